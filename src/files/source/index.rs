//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;

use super::json::{Object, UniqueMap, parse_object as parse_json};
use crate::error::quote;
use crate::text_file::strip_bom_bytes;

/// Maximum bytes of an index; a model with a hundred thousand tensors needs a tenth of this.
const MAX_SIZE: usize = 64 << 20;

/// Maximum shards; fewer than the files that can be mapped at once.
const MAX_SHARDS: usize = 192;

#[derive(Deserialize)]
struct RawIndex {
    weight_map: UniqueMap<String>,
}

/// Parses and checks an index. Returns the tensors of each shard, sorted.
pub fn parse_index(file: &[u8]) -> Result<BTreeMap<String, Vec<String>>, String> {
    if file.len() > MAX_SIZE {
        return Err(format!("the file is {} bytes long; an index has at most {MAX_SIZE}", file.len()));
    }
    let Object(RawIndex { weight_map: UniqueMap(map) }) = parse_json(&strip_bom_bytes(file.to_vec()))?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in map {
        if !is_file_name(&shard) {
            return Err(format!(
                "weight_map: tensor {} is in {}, which is not the name of a file next to the index",
                quote(&tensor),
                quote(&shard)
            ));
        }
        shards.entry(shard).or_default().push(tensor);
    }
    match shards.len() {
        0 => Err("weight_map: lists no tensors".into()),
        1..=MAX_SHARDS => Ok(shards),
        count => Err(format!("weight_map: names {count} shards; at most {MAX_SHARDS} are supported")),
    }
}

/// Returns true if `name` stays in the directory that it is joined to. The file may be a symbolic link to anywhere, as
/// in the Hugging Face cache.
fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let one = matches!(components.next(), Some(Component::Normal(first)) if first == name);
    one && components.next().is_none() && !name.contains(['\\', '\0'])
}
