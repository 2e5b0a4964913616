//! `serve`: an HTTP server for the model, compatible with the OpenAI and Anthropic APIs.

mod access;
/// One file per API, which reads its requests and writes its responses.
mod api {
    pub mod chat;
    pub mod completions;
    pub mod embeddings;
    pub mod llama_cpp;
    pub mod messages;
    pub mod openai;
    pub mod rerank;
    pub mod responses;
}
mod body;
mod client_stream;
mod connections;
mod constraint;
mod conversation;
mod dialect;
mod error;
mod json_writer;
mod memory;
mod metrics;
mod models;
mod output;
mod params;
mod prepare;
mod response;
mod routes;
mod state;
mod tools;
mod unsupported;

use crate::cli::args::{
    CONVERSATION_CONTEXT_HELP, FlagWarnings, ModelArgs, QuietArgs, SamplerArgs, TemplateChoiceArgs,
    check_range, read_text,
};
use crate::cli::load;
use crate::cli::signal;
use crate::cli::terminal::Verbosity;
use crate::run::embed::Pooling;
use crate::run::engine::template_source;
use crate::run::generate::scheduler::{Limits, Scheduler, SchedulerEvent};
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::plan::{OpenedModel, Plan, format_mib};
use crate::run::session::CancelToken;
use access::{AccessRules, check_key};
use clap::Args;
use files::{Error, Result, print_stderr};
use memory::MemoryBudget;
use state::{ServerModel, ServerState, SlotsEndpoint};
use std::net::{TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Maximum of `--slots`.
const MAX_SLOTS: usize = 256;
/// Default of `--cache-mib`.
pub const DEFAULT_CACHE_MIB: u64 = 256;

/// Flags of `serve`.
#[derive(Args, Clone)]
#[command(mut_arg("max_seq_len", |arg| {
    arg.help(CONVERSATION_CONTEXT_HELP.replace("Context size", "Context size of each slot"))
}))]
pub struct ServeArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    /// Address to listen on; 0.0.0.0 listens on every network interface
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS", help_heading = "Server")]
    host: String,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 8080, value_name = "N", help_heading = "Server")]
    port: u16,
    /// Number of requests to process in parallel; each takes memory only as it grows
    #[arg(long, visible_aliases = ["parallel", "np"], default_value_t = 4, value_name = "N", help_heading = "Server")]
    slots: usize,
    /// Maximum number of requests waiting for a slot; further ones get 429
    #[arg(long, default_value_t = 64, value_name = "N", help_heading = "Server")]
    queue: usize,
    /// Memory for cached prompt prefixes of finished requests, in MiB; 0 turns the cache off
    #[arg(long, default_value_t = DEFAULT_CACHE_MIB, value_name = "MIB", help_heading = "Server")]
    cache_mib: u64,
    /// Grace period for running requests after SIGTERM or Ctrl-C, in seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS", help_heading = "Server")]
    drain: u64,
    /// Timeout for a client that sends its request, or reads its response, too slowly, in seconds
    #[arg(long, default_value_t = 60, value_name = "SECONDS", help_heading = "Server")]
    patience: u64,
    /// API key that requests must send; may be repeated. Other users of this machine can see it: prefer --api-key-file
    #[arg(long, value_name = "KEY", help_heading = "Server")]
    api_key: Vec<String>,
    /// File of API keys, one per line
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    api_key_file: Option<PathBuf>,
    /// Without keys: allow web pages of this origin, such as http://localhost:3000; may be repeated, * allows any
    #[arg(long, value_name = "ORIGIN", help_heading = "Server")]
    cors_origin: Vec<String>,
    /// Without keys: accept this name in the Host header, as behind a proxy; may be repeated, * accepts any
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    allowed_host: Vec<String>,
    /// Model name in responses, instead of the one the program was built with
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    alias: Option<String>,
    /// Enable GET /slots, which shows the prompt and output lengths of all clients
    #[arg(long, help_heading = "Server")]
    slots_endpoint: bool,
    /// Pooling of embeddings: mean, cls (the first token's state) or last [default: as the model's files say]
    #[arg(long, value_name = "mean|cls|last", help_heading = "Server")]
    pooling: Option<Pooling>,
    #[command(flatten, next_help_heading = "Sampling")]
    sampler: SamplerArgs,
    #[command(flatten, next_help_heading = "Chat")]
    template: TemplateChoiceArgs,
    #[command(flatten, next_help_heading = "Output")]
    quiet: QuietArgs,
    #[command(flatten)]
    model: ModelArgs,
}

impl ServeArgs {
    /// Model name in responses.
    fn model_name(&self) -> &str {
        self.alias.as_deref().unwrap_or(crate::dims::MODEL)
    }

    /// Keys of `--api-key` and `--api-key-file`.
    fn read_keys(&self) -> Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        keys.iter().try_for_each(|key| check_key("--api-key", key))?;
        if let Some(file) = &self.api_key_file {
            let text = read_text("--api-key-file", file)?;
            let place = format!("--api-key-file {}", file.display());
            let from_flags = keys.len();
            for (i, key) in text.lines().map(str::trim).enumerate().filter(|(_, key)| !key.is_empty()) {
                check_key(&format!("{place}: line {}", i + 1), key)?;
                keys.push(key.to_owned());
            }
            if keys.len() == from_flags {
                return Err(Error::Usage(format!("{place}: contains no key")));
            }
        }
        Ok(keys)
    }

    /// Binds the port before anything is loaded.
    fn bind_listener(&self) -> Result<TcpListener> {
        let wrong = |e: std::io::Error| {
            let place = format!("--host {} --port {}", self.host, self.port);
            Error::Usage(format!("{place}: cannot listen: {e}; use another --port or --host"))
        };
        let addresses: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs().map_err(wrong)?.collect();
        TcpListener::bind(&addresses[..]).map_err(wrong)
    }
}

/// Engine options for `slots` slots and a prefix cache of `cache_mib` MiB.
pub fn engine_options(model: &ModelArgs, slots: usize, cache_mib: u64) -> Result<EngineOptions> {
    let options = EngineOptions {
        batch: check_range("--slots", slots, MAX_SLOTS)?,
        prefix_cache: cache_mib.saturating_mul(1 << 20),
        ..model.resolve_options()?
    };
    Ok(model.with_conversation_context(options))
}

/// Memory of a server in its plan.
pub struct ServerMemory {
    /// Bytes that requests and answers may take.
    pub requests: u64,
    /// Bytes of the rows that all slots share, if these cannot all be full.
    pub shared_rows: Option<u64>,
}

/// Adds a server to the plan, and shortens its default context to what fits.
pub fn plan_server(model: &ModelArgs, plan: &mut Plan) -> ServerMemory {
    let requests = plan.add_requests();
    plan.share_rows();
    model.fit_default_context(plan);
    ServerMemory { requests, shared_rows: plan.share_rows() }
}

pub fn run(args: &ServeArgs) -> Result<()> {
    let access = AccessRules::new(args.read_keys()?, &args.host, &args.cors_origin, &args.allowed_host)?;
    let settings = engine_options(&args.model, args.slots, args.cache_mib)?;
    let queue = check_range("--queue", args.queue, 1 << 16)?;
    let mut defaults = GenerateOptions {
        sampler: args.sampler.resolve_options()?,
        max_tokens: None,
        ..GenerateOptions::default()
    };
    let listener = args.bind_listener()?;
    let address = listener.local_addr().map_err(|e| Error::Other(format!("cannot listen: {e}")))?;
    let slots_endpoint = if args.slots_endpoint { SlotsEndpoint::Shown } else { SlotsEndpoint::Hidden };
    let patience = Duration::from_secs(args.patience.clamp(1, 1 << 20));
    let access = access.listening_at(address.ip());
    let state = Arc::new(ServerState::new(args.model_name(), access, slots_endpoint, patience));
    if !address.ip().is_loopback() && !state.access.has_keys() {
        warn_of_open_network(&args.host);
    }
    let connections = connections::start_thread(listener, Arc::clone(&state))?;

    let mut opened = OpenedModel::new(&settings)?;
    let ServerMemory { requests, shared_rows: rows } = plan_server(&args.model, &mut opened.plan);
    let memory = MemoryBudget::new(requests);
    let planned = [opened.plan.idle_bytes(), opened.plan.needed_bytes()].map(format_mib);
    let model_id = opened.plan.model_id.clone();
    let chosen =
        args.template.is_given().then(|| args.template.load_template(&template_source(&opened.model)));
    let (template, variables) = (chosen.transpose()?, args.template.parse_variables()?);
    let loaded = load::load_engine(opened, args.quiet.verbosity(), &args.warnings)?;
    defaults.sampler =
        args.sampler.with_recommended(defaults.sampler, &loaded.engine.recommended_sampling()?)?;
    let limits = Limits { queue, rows, drain: Duration::from_secs(args.drain) };
    let model = Arc::new(ServerModel {
        name: args.model_name().to_owned(),
        template_kwargs: variables,
        fingerprint: compute_fingerprint(&model_id, loaded.engine.options()),
        scheduler: Scheduler::new(limits),
        memory,
        has_fixed_seed: args.sampler.parse_seed().is_some(),
        engine: match template {
            Some(template) => loaded.engine.with_template(template)?,
            None => loaded.engine,
        },
        defaults,
        pooling: args.pooling,
    });
    let stop = CancelToken::default();
    signal::connect_cancel(&stop);
    signal::expect_drain();
    let ran = model.scheduler.run(&model.engine, &stop, &|event| match event {
        SchedulerEvent::Ready => {
            state.set_model(Arc::clone(&model));
            say_ready(args, model.engine.options().max_seq_len, &format!("http://{address}"), &planned);
        }
        SchedulerEvent::Draining => state.start_draining(),
    });
    state.end_connections();
    let _ = connections.join();
    ran
}

fn warn_of_open_network(host: &str) {
    print_stderr!(
        "warning: --host {host} accepts requests from the network without a key; use --api-key-file"
    );
}

/// Prints the server's address, even with `--quiet`: other programs wait for this line.
fn say_ready(args: &ServeArgs, tokens: usize, address: &str, [empty, full]: &[String; 2]) {
    let (model, slots) = (crate::dims::MODEL, args.slots);
    if args.quiet.verbosity() == Verbosity::Quiet {
        return print_stderr!("{address}");
    }
    print_stderr!(
        "{model} at {address}: {slots} slots of {tokens} tokens; {empty} of memory now, {full} when all are full"
    );
}

/// `system_fingerprint`: a hash of everything that determines a response (weights, program, cache settings).
fn compute_fingerprint(model_id: &str, o: &EngineOptions) -> String {
    let what = format!("{model_id} {} {} {:?}", env!("CARGO_PKG_VERSION"), o.kv_types, o.eviction.policy);
    format!("fp_{:08x}", crc32fast::hash(what.as_bytes()))
}
