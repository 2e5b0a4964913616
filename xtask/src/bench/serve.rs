//! `cargo xtask bench serve`: the server under the load of many clients, alone or in turn with another server.

mod figures;
mod load;
mod stream;

use super::BenchArgs;
use crate::device::{DeviceArgs, DeviceKind};
use crate::error::{AtPath, Error, Result};
use crate::run::serve;
use crate::{command, deploy};
use clap::{Args, value_parser};
use load::Load;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use stream::Server;

#[derive(Args)]
pub struct LoadArgs {
    /// With serve: numbers of concurrent clients
    #[arg(long, value_name = "LIST", requires = "mode", value_delimiter = ',', default_value = "1,4,16",
          value_parser = value_parser!(u64).range(1..=1024))]
    clients: Vec<u64>,
    /// With serve: seconds that each load lasts
    #[arg(long, value_name = "S", requires = "mode", default_value_t = 30, value_parser = value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// With serve: tokens of a prompt, approximately
    #[arg(long, value_name = "N", requires = "mode", default_value_t = 128, value_parser = value_parser!(u64).range(1..=1_000_000))]
    prompt: u64,
    /// With serve: tokens of an answer
    #[arg(long, value_name = "N", requires = "mode", default_value_t = 128, value_parser = value_parser!(u64).range(1..=1_000_000))]
    generate: u64,
    /// With serve: tokens of a long prompt sent in the middle; 0: none
    #[arg(long, value_name = "N", requires = "mode", default_value_t = 4096, value_parser = value_parser!(u64).range(0..=1_000_000))]
    long: u64,
    /// With serve: measure this server too, taking turns in being first
    #[arg(long, value_name = "URL", requires = "mode", value_parser = Server::parse)]
    peer: Option<Server>,
    /// With serve: measure this running server instead of starting one
    #[arg(long, value_name = "URL", requires = "mode", value_parser = Server::parse)]
    server: Option<Server>,
}

/// Files whose text the prompts are cut from.
const TEXTS: [&str; 5] =
    ["README.md", "CONTRIBUTING.md", "xtask/README.md", "CHANGELOG.md", "xtask/MEASUREMENTS.md"];

pub fn run(args: &BenchArgs) -> Result<Value> {
    let mut started = None;
    let ours = match &args.load.server {
        Some(_) if !args.words.is_empty() => {
            return Err(Error::Usage("--server: flags after -- need a server that is started here".into()));
        }
        Some(server) => server.clone(),
        None => {
            let ours = StartedServer::start(args, &args.load.server_words(&args.words))?;
            let server = Server::parse(&ours.address).map_err(Error::Failed)?.named("antigravity");
            started = Some(ours);
            server
        }
    };
    let servers: Vec<Server> = [ours].into_iter().chain(args.load.peer.clone()).collect();
    let record = measure(&servers, &args.load, args.runs.unwrap_or(1))?;
    drop(started);
    print!("{}", figures::tables(&record));
    Ok(record)
}

impl LoadArgs {
    /// Flags of a server with room for all clients, unless the user gives others.
    fn server_words(&self, theirs: &[String]) -> Vec<String> {
        let most = self.clients.iter().copied().max().unwrap_or(1) + u64::from(self.long > 0);
        // Prompts may be a little longer than `--prompt`.
        let room = self.prompt.max(self.long) * 9 / 8 + self.generate + 32;
        let mut words = ["serve", "-q", "--port", "0"].map(String::from).to_vec();
        words.extend_from_slice(theirs);
        let own: [(&[&str], u64); 3] = [
            (&["--slots", "--parallel", "--np"], most),
            (&["--max-seq-len", "-c", "--ctx-size"], room),
            (&["--queue"], most),
        ];
        for (names, value) in own {
            let is_one = |word: &String| names.contains(&word.split('=').next().unwrap_or_default());
            if !theirs.iter().any(is_one) {
                words.extend([names[0].into(), value.to_string()]);
            }
        }
        words
    }
}

/// Measures every load on every server, in turn.
fn measure(servers: &[Server], args: &LoadArgs, count: u64) -> Result<Value> {
    let read = |name: &&str| {
        let file = command::root().join(name);
        std::fs::read_to_string(&file).at(&file)
    };
    let text = TEXTS.iter().map(read).collect::<Result<String>>()?;
    let LoadArgs { seconds, prompt, generate, long, .. } = *args;
    let load = Load { text: &text, seconds, prompt, generate, long };
    let lengths =
        servers.iter().map(|server| load.characters_per_token(server)).collect::<Result<Vec<_>>>()?;
    let (mut runs, mut turn) = (Vec::new(), 0);
    for run in 0..count {
        for &clients in &args.clients {
            let mut order: Vec<_> = servers.iter().zip(&lengths).collect();
            if run % 2 == 1 {
                order.reverse();
            }
            for (server, &length) in order {
                eprintln!("{}: {clients} clients, run {} of {count}", server.name, run + 1);
                turn += 1;
                let mut figures =
                    figures::summarise_load(&load.run_clients(server, clients as usize, (turn, length)));
                if let (Some(0), Some(why)) = (figures["requests"].as_u64(), figures["error"].as_str()) {
                    return Err(Error::Failed(format!("no request succeeded: {why}")));
                }
                figures["server"] = server.name.as_str().into();
                runs.push(figures);
            }
        }
    }
    // In the table the first server comes first.
    runs.sort_by_key(|run| servers.iter().position(|server| run["server"] == server.name));
    Ok(
        json!({"schema": 1, "seconds": seconds, "prompt": prompt, "generate": generate, "long": long, "runs": runs}),
    )
}

/// A server that was started by `cargo xtask run -- serve`, perhaps on a phone.
struct StartedServer {
    child: Child,
    address: String,
}

impl StartedServer {
    fn start(args: &BenchArgs, words: &[String]) -> Result<StartedServer> {
        let local = args.load.peer.is_some().then_some(DeviceKind::Local);
        let device = DeviceArgs { device: args.device.device.or(local), ..args.device.clone() };
        let model = args.model.dir()?;
        deploy::deploy(&*device.open()?, &model, &[])?;
        let itself =
            std::env::current_exe().map_err(|e| Error::Failed(format!("cannot start myself: {e}")))?;
        let mut run = Command::new(itself);
        run.arg("run").arg("--model").arg(&model);
        let kind = device.device.unwrap_or(DeviceKind::Adb);
        if kind == DeviceKind::Adb {
            // Another port than on the phone: a fake phone shares the ports of this machine.
            run.arg("--port").arg(serve::free_port()?.to_string());
        }
        run.args(["--device", kind.word()]);
        for (flag, value) in [("--serial", &device.serial), ("--target", &device.target)] {
            run.args(value.iter().flat_map(|value| [flag, value]));
        }
        run.arg("--").args(words).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = run.spawn().map_err(|e| command::cannot_start(&run, e))?;
        let mut address = String::new();
        let stdout = child.stdout.take().expect("stdout is piped");
        let _ = BufReader::new(stdout).read_line(&mut address);
        let started = StartedServer { child, address: address.trim().into() };
        if started.address.is_empty() {
            return Err(Error::Failed("the server did not start; see its error above".into()));
        }
        Ok(started)
    }
}

impl Drop for StartedServer {
    /// Ends the server, on the device too.
    fn drop(&mut self) {
        let _ = Command::new("kill").arg("-INT").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_has_room_for_all_clients() {
        let parse = |line: &str| crate::parse_args::<BenchArgs>(line);
        let words = |line: &str| {
            let args = parse(line).unwrap();
            args.load.server_words(&args.words).join(" ")
        };
        assert_eq!(
            words("serve --clients 1,8 --long 800 --generate 8"),
            "serve -q --port 0 --slots 9 --max-seq-len 940 --queue 9"
        );
        assert_eq!(
            words("serve --clients 8 --long 0 -- -c 99 --slots=2"),
            "serve -q --port 0 -c 99 --slots=2 --queue 8"
        );
        for line in
            ["--clients 0", "--clients 1,,2", "--clients x", "--long -1", "--server a:1", "--peer https://a"]
        {
            assert_eq!(parse(&format!("serve {line}")).err().map(|e| e.exit_code()), Some(2), "{line}");
        }
        let given = parse("serve --server http://a:1 -- -t 1").unwrap();
        assert_eq!(run(&given).unwrap_err().exit_code(), 2);
    }
}
