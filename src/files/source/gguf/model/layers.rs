//! The kinds and sizes of layers, and what else a family keeps in keys of its own.

use super::*;

impl Keys<'_> {
    /// Builds `layer_types` of `config.json`; `None` for families without it.
    pub(super) fn layer_types(&self, layers: usize) -> Result<Option<Vec<&'static str>>, ConfigError> {
        let (other, found) = match self.arch {
            Arch::Gemma3 | Arch::Gemma4 => ("sliding_attention", self.windowed_layers(layers, 6)?),
            Arch::Olmo3 | Arch::Exaone4 => ("sliding_attention", self.windowed_layers(layers, 4)?),
            Arch::GptOss => ("sliding_attention", self.windowed_layers(layers, 2)?),
            Arch::Lfm2 | Arch::Lfm2Moe => {
                ("conv", self.read_flags(KV_HEADS, layers, |value| Some(value.as_u64()? == 0))?)
            }
            Arch::Qwen35 | Arch::Qwen35Moe if self.get(RECURRENT).is_some() => {
                ("linear_attention", self.read_flags(RECURRENT, layers, read_flag)?)
            }
            Arch::GraniteMoeHybrid => {
                let mambas = self.read_flags(KV_HEADS, layers, |value| Some(value.as_u64()? == 0))?;
                return Ok(Some(
                    mambas.into_iter().map(|mamba| if mamba { "mamba" } else { "attention" }).collect(),
                ));
            }
            Arch::NemotronH => {
                let attention = self.read_flags(KV_HEADS, layers, |value| Some(value.as_u64()? > 0))?;
                let mlp = self.read_flags(FFN_WIDTHS, layers, |value| Some(value.as_u64()? > 0))?;
                let name = |(attention, mlp)| match (attention, mlp) {
                    (_, true) => "mlp",
                    (true, false) => "attention",
                    (false, false) => "mamba",
                };
                return Ok(Some(attention.into_iter().zip(mlp).map(name).collect()));
            }
            _ => return Ok(None),
        };
        Ok(Some(found.into_iter().map(|is_other| if is_other { other } else { "full_attention" }).collect()))
    }

    /// Finds the layers with a window: none if there is no window. Without the key, all but each `default`-th.
    fn windowed_layers(&self, layers: usize, default: usize) -> Result<Vec<bool>, ConfigError> {
        let pattern = self.get(PATTERN);
        if !self.has_window() {
            return Ok(vec![false; layers]);
        }
        let every = match pattern {
            None => default,
            Some(Value::Array(_)) => return self.read_flags(PATTERN, layers, read_flag),
            Some(number) => match number.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(every) => every,
                None => return self.unsupported(PATTERN, "an integer, or a boolean for each layer"),
            },
        };
        // Every `every`-th layer has full attention; none if it is 0.
        Ok((1..=layers).map(|layer| every == 0 || !layer.is_multiple_of(every)).collect())
    }

    /// Reads an array with a value for each layer, or one value for all.
    fn read_flags(
        &self,
        key: &str,
        layers: usize,
        flag: impl Fn(&Value) -> Option<bool>,
    ) -> Result<Vec<bool>, ConfigError> {
        let flags: Option<Vec<bool>> = match self.get(key) {
            Some(Value::Array(array)) if array.len() == layers.saturating_add(self.extra_blocks()) => {
                array.iter().take(layers).map(|value| flag(&value)).collect()
            }
            Some(Value::Array(_)) | None => None,
            Some(value) => flag(value).map(|flag| vec![flag; layers]),
        };
        match flags {
            Some(flags) => Ok(flags),
            None => self.unsupported(key, &format!("a value for each of {layers} layers")),
        }
    }

    /// Adds fields that follow from several keys, or have other defaults.
    pub(super) fn add_family_fields(&self, map: &mut Map<String, Json>) -> Result<(), ConfigError> {
        let number = |map: &Map<String, Json>, field: &str| map.get(field).and_then(Json::as_u64);
        let head_dim = number(map, "head_dim").filter(|width| *width > 0);
        if let (Arch::Phi3 | Arch::Qwen35 | Arch::Qwen35Moe, Some(rotated), Some(head_dim)) =
            (self.arch, self.get("rope.dimension_count").and_then(Value::as_u64), head_dim)
        {
            map.insert("partial_rotary_factor".into(), (rotated as f64 / head_dim as f64).into());
        }
        if let Some(blocks) = number(map, "num_hidden_layers") {
            let layers = blocks.saturating_sub(self.extra_blocks() as u64);
            map.insert("num_hidden_layers".into(), layers.into());
            // The config rejects larger numbers of layers.
            let layers = usize::try_from(layers).unwrap_or(0).min(1 << 16);
            if let Some(kinds) = self.layer_types(layers)? {
                let field = if self.arch == Arch::NemotronH { "layers_block_type" } else { "layer_types" };
                map.insert(field.into(), json!(kinds));
            }
        }
        match (self.arch, head_dim) {
            (Arch::Granite | Arch::GraniteMoeHybrid, Some(head_dim)) => {
                let scale = f64::from(1.0 / (head_dim as f32).sqrt());
                map.entry("attention_multiplier").or_insert(scale.into());
            }
            (Arch::SmolLm3 | Arch::Lfm2 | Arch::Lfm2Moe | Arch::Ernie45 | Arch::Ministral3, _) => {
                map.entry("rope_theta").or_insert(10_000.0.into());
            }
            // llama.cpp always does it.
            (Arch::Qwen3Moe, _) => {
                map.insert("norm_topk_prob".into(), true.into());
            }
            (Arch::Gemma4, _) => self.add_gemma4_fields(map)?,
            (Arch::Qwen35 | Arch::Qwen35Moe, _) => {
                let heads = number(map, "linear_num_value_heads").unwrap_or(0).max(1);
                match self.get(INNER).and_then(Value::as_u64).filter(|inner| *inner > 0) {
                    Some(inner) if inner.is_multiple_of(heads.saturating_mul(16)) => {
                        map.insert("linear_value_head_dim".into(), (inner / heads).into());
                    }
                    _ => return self.unsupported(INNER, "a multiple of 16 x ssm.time_step_rank"),
                }
            }
            _ => {}
        }
        self.add_mamba_fields(map)
    }

    /// Adds the fields of models with Mamba2.
    fn add_mamba_fields(&self, map: &mut Map<String, Json>) -> Result<(), ConfigError> {
        if !matches!(self.arch, Arch::GraniteMoeHybrid | Arch::FalconH1 | Arch::NemotronH) {
            return Ok(());
        }
        let mut put =
            |field: &'static str, value: Json| map.insert(self.arch.field_name(field).into(), value);
        let has = |end: &str| self.header.tensors.keys().any(|name| name.ends_with(end));
        put("mamba_conv_bias", has("ssm_conv1d.bias").into());
        let heads = self.get("ssm.time_step_rank").and_then(Value::as_u64).unwrap_or(0).max(1);
        match self.get(INNER).and_then(Value::as_u64).filter(|inner| *inner > 0) {
            Some(inner) if inner.is_multiple_of(heads.saturating_mul(16)) => {
                put("mamba_d_head", (inner / heads).into());
                put("mamba_d_ssm", inner.into());
            }
            _ => return self.unsupported(INNER, "a multiple of 16 x ssm.time_step_rank"),
        }
        if self.arch == Arch::FalconH1 {
            put("mamba_rms_norm", has("ssm_norm.weight").into());
            put("mamba_norm_before_gate", false.into());
        }
        if self.arch == Arch::GraniteMoeHybrid {
            // Experts have this width, if there are any.
            if let Some(width) = self.get(FFN_WIDTHS).and_then(|value| ValueForm::PerLayer.to_json(value)) {
                put("moe_intermediate_size", width);
            }
            let rotates = self.get(ROPE_IN_USE).is_none_or(|value| read_flag(value) == Some(true));
            put("position_embedding_type", if rotates { "rope" } else { "nope" }.into());
        }
        Ok(())
    }

    /// Adds the fields of Gemma 4's layers, which differ in the widths of heads and feed-forwards.
    fn add_gemma4_fields(&self, map: &mut Map<String, Json>) -> Result<(), ConfigError> {
        let count = |field: &str| map.get(field).and_then(Json::as_u64).unwrap_or(0) as usize;
        let (layers, shared) = (count("num_hidden_layers").min(1 << 16), count("num_kv_shared_layers"));
        let of_layers = |key: &str| -> Option<Vec<u64>> {
            match self.get(key) {
                Some(Value::Array(all)) if all.len() == layers => all.iter().map(|n| n.as_u64()).collect(),
                Some(number) => number.as_u64().map(|n| vec![n; layers]),
                None => None,
            }
        };
        let widths = of_layers(FFN_WIDTHS);
        let (own, reading) = widths
            .as_deref()
            .unwrap_or_default()
            .split_at_checked(layers.saturating_sub(shared))
            .unwrap_or_default();
        let (Some(&width), Some(&shared_width)) = (own.first(), reading.first().or(own.first())) else {
            return self.unsupported(FFN_WIDTHS, &format!("a width for each of {layers} layers"));
        };
        let wide = shared_width == width.saturating_mul(2);
        if own.iter().any(|w| *w != width)
            || reading.iter().any(|w| *w != shared_width)
            || !wide && shared_width != width
        {
            return self
                .unsupported(FFN_WIDTHS, "one width, and once or twice that in layers that share keys");
        }
        self.add_gemma4_heads(map, of_layers(KV_HEADS))?;
        let experts = map.get("num_experts").and_then(Json::as_u64).unwrap_or(0);
        map.insert("enable_moe_block".into(), (experts > 0).into());
        map.insert("intermediate_size".into(), width.into());
        map.insert("use_double_wide_mlp".into(), wide.into());
        map.entry("hidden_size_per_layer_input").or_insert(0.into());
        if let Some(width) = map.get("head_dim").cloned() {
            map.insert("global_head_dim".into(), width);
        }
        if let Some(width) = map.remove("local_head_dim") {
            map.insert("head_dim".into(), width);
        }
        Ok(())
    }

    /// Adds the numbers of Gemma 4's KV heads by kind of layer, from those of each layer, and where values are keys.
    fn add_gemma4_heads(
        &self,
        map: &mut Map<String, Json>,
        heads: Option<Vec<u64>>,
    ) -> Result<(), ConfigError> {
        let kinds = map.get("layer_types").and_then(Json::as_array).cloned().unwrap_or_default();
        let first = |kind: &str| kinds.iter().position(|k| k == kind);
        let (sliding, full) = (first("sliding_attention"), first("full_attention"));
        if self.get(KV_HEADS).is_some() {
            let heads = heads.unwrap_or_default();
            let of_layer = |layer: Option<usize>| layer.and_then(|layer| heads.get(layer).copied());
            let of_kind = |kind: &Json| of_layer(if kind == "full_attention" { full } else { sliding });
            if heads.is_empty() || !heads.iter().zip(&kinds).all(|(n, kind)| Some(*n) == of_kind(kind)) {
                return self.unsupported(KV_HEADS, "a number for each layer, the same for all of a kind");
            }
            map.insert("num_key_value_heads".into(), of_layer(sliding.or(full)).into());
            map.insert("num_global_key_value_heads".into(), of_layer(full).into());
        }
        let has = |layer: usize, part: &str| {
            self.header.tensors.contains_key(&format!("blk.{layer}.attn_{part}.weight"))
        };
        let values_are_keys = full.is_some_and(|layer| has(layer, "k") && !has(layer, "v"));
        map.insert("attention_k_eq_v".into(), values_are_keys.into());
        Ok(())
    }
}

/// Reads a boolean, or a number that stands for one.
fn read_flag(value: &Value) -> Option<bool> {
    match (value, value.as_u64()) {
        (Value::Bool(flag), _) => Some(*flag),
        (_, Some(number @ 0..=1)) => Some(number == 1),
        _ => None,
    }
}
