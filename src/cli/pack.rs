//! `pack`: writes the packed model file.

use super::args::PackArgs;
use super::terminal::Progress;
use crate::cpu::topology;
use crate::error::{Error, Result};
use crate::weights::source::Source;
use crate::weights::{LoadOptions, ModelPath, PACKED_NAME, WeightType, check_config, pack, read_text};
use std::time::Instant;

pub(super) fn run(args: &PackArgs) -> Result<()> {
    let began = Instant::now();
    let path = ModelPath::new(&args.path())?;
    let config = path.dir.join("config.json");
    let text = read_text(&config)?;
    check_config(&config, &text)?;
    let source = Source::open(&path.weights)?;
    let out = args.out.clone().unwrap_or_else(|| path.dir.join(PACKED_NAME));
    if out.is_dir() {
        return Err(Error::Usage(format!("--out {}: is a directory; name a file in it", out.display())));
    }
    let progress = Progress::new("packing tensor", args.quiet);
    let options = LoadOptions {
        weight_type: WeightType::Q4_0,
        threads: args.threads.unwrap_or_else(topology::default_threads).clamp(1, 1024),
        progress: &|done, all| progress.show(done, all),
    };
    let bytes = pack::write(&source, &text, &out, &options)?;
    if !args.quiet {
        let seconds = began.elapsed().as_secs_f64();
        eprintln!("{}: {:.1} MiB in {seconds:.1} s", out.display(), bytes as f64 / 1_048_576.0);
    }
    Ok(())
}
