//! `cargo xtask bench serve`: clients that ask the server together, alone or in turn with another server.

mod figures;
mod load;
mod stream;

use crate::args::{Args, Flag, Flags};
use crate::device::local::Local;
use crate::device::{self, Device};
use crate::error::{Error, Result};
use crate::run::serve;
use crate::{build, deploy, sh};
use files::atomic_file;
use load::Plan;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use stream::Server;

pub const FLAGS: &[Flag] = &[
    Flag::valued("--clients", "LIST", "of serve: how many ask together [1,4,16]"),
    Flag::valued("--seconds", "S", "of serve: for how long [30]"),
    Flag::valued("--prompt", "N", "of serve: tokens of a prompt, about [128]"),
    Flag::valued("--generate", "N", "of serve: tokens of an answer [128]"),
    Flag::valued("--long", "N", "of serve: tokens of the prompt that comes in the middle; 0: none [4096]"),
    Flag::valued(
        "--peer",
        "URL",
        "of serve: measure this server too, in turn, each first in every other run",
    ),
    Flag::valued("--server", "URL", "of serve: measure this server instead of one that is started"),
];
const ALL: Flags = &[device::FLAGS, build::MODEL, super::RUNS_AND_FILE, FLAGS];
/// Pages whose text is asked about.
const TEXTS: [&str; 4] = ["README.md", "CONTRIBUTING.md", "xtask/README.md", "CHANGELOG.md"];

/// What the flags say.
struct Options {
    clients: Vec<usize>,
    runs: u64,
    seconds: u64,
    prompt: u64,
    generate: u64,
    long: u64,
}

impl Options {
    fn of(args: &Args) -> Result<Options> {
        let number = |flag, default, range| Ok(args.number(flag, range)?.unwrap_or(default));
        let list = args.value("--clients").unwrap_or("1,4,16");
        let client = |word: &str| word.trim().parse().ok().filter(|n| (1..=1024).contains(n));
        let clients: Option<Vec<usize>> = list.split(',').map(client).collect();
        Ok(Options {
            clients: clients
                .ok_or_else(|| Error::Usage(format!("--clients {list}: use numbers from 1 to 1024")))?,
            runs: number("--runs", 1, 1..=1000)?,
            seconds: number("--seconds", 30, 1..=86_400)?,
            prompt: number("--prompt", 128, 1..=1_000_000)?,
            generate: number("--generate", 128, 1..=1_000_000)?,
            long: number("--long", 4096, 0..=1_000_000)?,
        })
    }

    /// Flags of a server that takes all of this at once, where the user gives no others.
    fn server(&self, theirs: &[String]) -> Vec<String> {
        let most = self.clients.iter().copied().max().unwrap_or(1) + usize::from(self.long > 0);
        // Prompts are as long as was asked for, about.
        let room = self.prompt.max(self.long) * 9 / 8 + self.generate + 32;
        let mut words = ["serve", "-q", "--port", "0"].map(String::from).to_vec();
        words.extend_from_slice(theirs);
        let mut add = |names: &[&str], value: String| {
            if !theirs
                .iter()
                .any(|word| names.iter().any(|name| word == name || word.starts_with(&format!("{name}="))))
            {
                words.extend([names[0].into(), value]);
            }
        };
        add(&["--slots", "--parallel", "--np"], most.to_string());
        add(&["--max-seq-len", "-c", "--ctx-size"], room.to_string());
        add(&["--queue"], most.to_string());
        words
    }
}

pub fn run(words: &[String], theirs: &[String]) -> Result<()> {
    let args = Args::parse(words, ALL)?;
    args.no_rest_but("flags of the server come after --")?;
    let options = Options::of(&args)?;
    let peer = args.value("--peer").map(Server::at).transpose()?;
    let given = args.value("--server").map(Server::at).transpose()?;
    let mut started = None;
    let ours = match given {
        Some(_) if !theirs.is_empty() => {
            return Err(Error::Usage(
                "--server: that server runs already; flags after -- are for one that is started".into(),
            ));
        }
        Some(server) => server,
        None => {
            let ours = Ours::start(&args, &options.server(theirs))?;
            let server = Server::at(&ours.address)?.named("antigravity");
            started = Some(ours);
            server
        }
    };
    let servers: Vec<Server> = [ours].into_iter().chain(peer).collect();
    let record = measure(&servers, &options)?;
    drop(started);
    print!("{}", figures::tables(&record));
    if let Some(file) = args.value("--json") {
        let text = format!("{record:#}\n");
        atomic_file::write(Path::new(file), text.as_bytes()).map_err(|e| Error::at(Path::new(file), e))?;
        eprintln!("results: {file}");
    }
    Ok(())
}

/// Puts every load on every server, in turn.
fn measure(servers: &[Server], options: &Options) -> Result<Value> {
    let read = |name: &&str| {
        let file = sh::root().join(name);
        std::fs::read_to_string(&file).map_err(|e| Error::at(&file, e))
    };
    let text = TEXTS.iter().map(read).collect::<Result<String>>()?;
    let Options { seconds, prompt, generate, long, .. } = *options;
    let plan = Plan { text: &text, seconds, prompt, generate, long };
    let mut lengths = Vec::new();
    for server in servers {
        lengths.push(load::characters_a_token(server, &plan)?);
    }
    let (mut runs, mut turn) = (Vec::new(), 0);
    for run in 0..options.runs {
        for &clients in &options.clients {
            let mut order: Vec<_> = servers.iter().zip(&lengths).collect();
            if run % 2 == 1 {
                order.reverse();
            }
            for (server, &length) in order {
                eprintln!("{}: {clients} clients, run {} of {}", server.name, run + 1, options.runs);
                turn += 1;
                let found = load::put(server, &plan, clients, (turn, length));
                let mut figures = figures::figures(&found);
                if let (Some(0), Some(why)) = (figures["requests"].as_u64(), figures["error"].as_str()) {
                    return Err(Error::Failed(format!("nothing was answered: {why}")));
                }
                figures["server"] = server.name.as_str().into();
                runs.push(figures);
            }
        }
    }
    // A table has the first server first, whichever began.
    runs.sort_by_key(|run| servers.iter().position(|server| run["server"] == server.name));
    Ok(
        json!({"schema": 1, "seconds": seconds, "prompt": prompt, "generate": generate, "long": long, "runs": runs}),
    )
}

/// The server that is started for this, as `cargo xtask run -- serve` starts it: on a phone too.
struct Ours {
    child: Child,
    address: String,
}

impl Ours {
    fn start(args: &Args, words: &[String]) -> Result<Ours> {
        let device: Box<dyn Device> = match (args.value("--peer"), args.value("--device")) {
            (Some(_), None) => Box::new(Local::open()),
            _ => device::select(args)?,
        };
        let model = build::chosen_model(args)?;
        deploy::deploy(&*device, &model, &[])?;
        let itself =
            std::env::current_exe().map_err(|e| Error::Failed(format!("cannot start myself: {e}")))?;
        let mut run = Command::new(itself);
        run.arg("run").arg("--model").arg(&model);
        let kind = args.value("--device").or(args.value("--peer").map(|_| "local"));
        if kind.unwrap_or("adb") == "adb" {
            // Not the port there, which is one of this machine too where a stand-in plays the phone.
            run.arg("--port").arg(serve::free_port()?.to_string());
        }
        for (flag, value) in
            [("--device", kind), ("--serial", args.value("--serial")), ("--target", args.value("--target"))]
        {
            run.args(value.into_iter().flat_map(|value| [flag, value]));
        }
        run.arg("--").args(words).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = run.spawn().map_err(|e| sh::cannot_start(&run, e))?;
        let mut address = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        let _ = BufReader::new(stdout).read_line(&mut address);
        let ours = Ours { child, address: address.trim().into() };
        match ours.address.is_empty() {
            true => Err(Error::Failed("the server did not start; it says why above".into())),
            false => Ok(ours),
        }
    }
}

impl Drop for Ours {
    /// Ends it there, too.
    fn drop(&mut self) {
        let _ = Command::new("kill").arg("-INT").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn the_server_takes_what_the_clients_ask_for() {
        let options = |line: &str| Options::of(&Args::parse(&words(line), ALL).unwrap());
        let o = options("--clients 1,8 --long 800 --generate 8").unwrap();
        assert_eq!(o.server(&[]).join(" "), "serve -q --port 0 --slots 9 --max-seq-len 940 --queue 9");
        let given = words("-c 99 --slots=2 -t 1");
        assert_eq!(o.server(&given).join(" "), "serve -q --port 0 -c 99 --slots=2 -t 1 --queue 9");
        let o = options("--long 0 --prompt 16").unwrap();
        assert_eq!((o.clients.as_slice(), o.runs, o.seconds), (&[1, 4, 16][..], 1, 30));
        assert!(o.server(&[]).join(" ").contains("--slots 16 --max-seq-len 178"));
        for line in ["--clients 0", "--clients 1,,2", "--clients x", "--seconds 0", "--long -1", "--runs 0"] {
            assert_eq!(options(line).err().map(|e| e.exit_code()), Some(2), "{line}");
        }
    }

    #[test]
    fn flags_that_do_not_fit_are_usage_errors() {
        for (line, theirs) in
            [("--server http://a:1", "-t 1"), ("--server a:1", ""), ("--peer https://a", ""), ("x", "")]
        {
            let e = run(&words(line), &words(theirs)).unwrap_err();
            assert_eq!(e.exit_code(), 2, "{line}: {e}");
        }
    }
}
