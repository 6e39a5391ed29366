//! The example agents, run directly: their own program, a real FIFO, the environment that a sandbox gives.

use std::{
    fs::{self, File},
    io::Write,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
};

use anyhow::{Context, Result};
use rustix::fs::{CWD, Mode as Permissions, mkfifoat};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use towpath_schemas::agent::AgentDefinition;

/// What a sandbox holds for one run of an agent.
struct Sandbox {
    dir: TempDir,
    agent: AgentDefinition,
    /// Held open both ways, as the supervisor does.
    fifo: File,
}

impl Sandbox {
    fn new(agent: &str, task: &str) -> Result<Self> {
        let definition = stage::checkout(&format!("deploy/agents/{agent}.toml"));
        let agent: AgentDefinition = toml::from_str(&fs::read_to_string(definition)?)?;
        agent.check()?;
        let dir = tempfile::tempdir()?;
        let at = |name: &str| dir.path().join(name);
        for folder in ["workspace", "workspace/outputs", "workspace/files"] {
            fs::create_dir(at(folder))?;
        }
        fs::write(at("task"), task)?;
        fs::write(at("manifest.json"), "[]")?;
        mkfifoat(CWD, at("steer"), Permissions::RUSR | Permissions::WUSR)?;
        let fifo = File::options().read(true).write(true).open(at("steer"))?;
        Ok(Self { dir, agent, fifo })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn attach(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.at("workspace/files").join(name);
        fs::write(&path, bytes)?;
        let manifest = json!([{"name": name, "path": path, "mediaType": "application/octet-stream", "size": bytes.len()}]);
        Ok(fs::write(self.at("manifest.json"), manifest.to_string())?)
    }

    fn steer(&mut self, line: &str) -> Result<()> {
        Ok(self.fifo.write_all(format!("{line}\n").as_bytes())?)
    }

    fn start(&self) -> Result<Child> {
        let (program, arguments) = self.agent.command.split_first().context("a command")?;
        let mut command = Command::new(program);
        command.args(arguments).envs(&self.agent.env).current_dir(self.at("workspace")).stdin(Stdio::null());
        command.env("TOWPATH_RUN_ID", "run_1").env("TOWPATH_EPOCH", "3").env("TOWPATH_WORKSPACE", self.at("workspace"));
        command.env("TOWPATH_TASK_FILE", self.at("task")).env("TOWPATH_STEER_FIFO", self.at("steer"));
        command.env("TOWPATH_ATTACHMENTS_MANIFEST", self.at("manifest.json")).env("TOWPATH_RESULT_FILE", self.at("result.md"));
        command.env("TOWPATH_OUTPUTS_DIR", self.at("workspace/outputs")).env("SURVEYOR_PACE_S", "0.2");
        Ok(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }

    fn run(&self) -> Result<Output> {
        Ok(self.start()?.wait_with_output()?)
    }

    fn result(&self) -> Result<String> {
        Ok(fs::read_to_string(self.at("result.md"))?)
    }

    fn report(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&fs::read(self.at("workspace/outputs/report.json"))?)?)
    }
}

/// A tar.gz made by Python's own tarfile, by the given lines of a program that has `add(name, text)` and `archive`.
fn archive(lines: &str) -> Result<Vec<u8>> {
    let program = format!(
        "import io, sys, tarfile\narchive = tarfile.open(fileobj=sys.stdout.buffer, mode='w|gz')\n\
         def add(name, text):\n    info = tarfile.TarInfo(name)\n    info.size = len(text)\n    archive.addfile(info, io.BytesIO(text))\n\
         {lines}\narchive.close()\n"
    );
    let made = Command::new("/usr/bin/python3").arg("-c").arg(program).output()?;
    anyhow::ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(made.stdout)
}

#[test]
fn echo_prints_repeats_each_steer_in_order_and_ends_as_told() -> Result<()> {
    let mut sandbox = Sandbox::new("echo", r#"{"print": "hello ⚓", "lines": 2, "steers": 3, "exit": 7, "witness": true}"#)?;
    sandbox.steer("one")?;
    sandbox.steer(r#"{"id": "str_1", "message": "two", "files": []}"#)?;
    let child = sandbox.start()?;
    sandbox.steer("three")?;
    let done = child.wait_with_output()?;
    assert_eq!(String::from_utf8(done.stdout.clone())?, "hello ⚓\nline 1\nline 2\none\ntwo\nthree\n");
    assert_eq!(done.status.code(), Some(7));
    let witness = fs::read_to_string(sandbox.at("workspace/witness"))?;
    assert_eq!(witness, format!("run_1 3 {} {}\n", done.stdout.len(), hex::encode(Sha256::digest(&done.stdout))));
    Ok(())
}

#[test]
fn echo_prints_the_bytes_it_is_asked_for_and_always_the_same() -> Result<()> {
    let sandbox = Sandbox::new("echo", r#"{"bytes": 3000001, "witness": true}"#)?;
    let (first, second) = (sandbox.run()?, sandbox.run()?);
    assert_eq!((first.stdout.len(), first.stdout == second.stdout), (3_000_001, true));
    assert_eq!(fs::read_to_string(sandbox.at("workspace/witness"))?.lines().count(), 2);
    Ok(())
}

#[test]
fn echo_refuses_a_task_it_does_not_understand_with_exit_code_2() -> Result<()> {
    for (task, said) in [
        ("count the code", "not JSON"),
        ("[1]", "must be a JSON object"),
        (r#"{"prnt": "x"}"#, "`prnt` is not a key"),
        (r#"{"lines": "2"}"#, "`lines` must be of type int"),
        (r#"{"exit": 256}"#, "at most 255"),
        (r#"{"bytes": -1}"#, "not negative"),
    ] {
        let done = Sandbox::new("echo", task)?.run()?;
        let error = String::from_utf8(done.stderr)?;
        assert_eq!((done.status.code(), done.stdout.len(), error.contains(said)), (Some(2), 0, true), "{task}: {error}");
    }
    assert_eq!(Sandbox::new("echo", "")?.run()?.status.code(), Some(0));
    Ok(())
}

#[test]
fn surveyor_counts_by_language_and_does_what_it_is_told_meanwhile() -> Result<()> {
    let mut sandbox = Sandbox::new("surveyor", "count the code")?;
    sandbox.attach(
        "code.tar.gz",
        &archive(
            "add('p/src/main.rs', b'fn main() {\\n}\\n')\nadd('p/src/lib.rs', b'// one line, no break')\nadd('p/tests/t.py', b'x\\n' * 50)\n\
             add('p/README.md', b'# hi\\n')\nadd('p/logo.png', b'\\x89PNG\\0\\0')",
        )?,
    )?;
    sandbox.steer("also list the two largest files")?;
    sandbox.steer("skip tests")?;
    sandbox.steer("sing a song")?;
    let done = sandbox.run()?;
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let report = sandbox.report()?;
    assert_eq!((&report["files"], &report["lines"], &report["left_out"]), (&json!(4), &json!(4), &json!(1)));
    assert_eq!(report["languages"][0], json!({"language": "Rust", "files": 2, "lines": 3, "bytes": 35}));
    assert_eq!(report["largest"].as_array().map(Vec::len), Some(2));
    let result = sandbox.result()?;
    for part in [
        "# Survey: count the code",
        "| Rust | 2 | 3 | 35 |",
        "The 2 largest files",
        "`skip tests`: whatever is `tests`",
        "`sing a song`: not understood",
    ] {
        assert!(result.contains(part), "{part} is not in\n{result}");
    }
    let output = String::from_utf8(done.stdout)?;
    assert!(output.contains("\u{1b}[36m[██████████████████████████████]\u{1b}[0m 100 %") && output.contains("» skip tests"), "{output}");
    Ok(())
}

#[test]
fn surveyor_unpacks_nothing_that_leads_out_of_the_archive() -> Result<()> {
    let sandbox = Sandbox::new("surveyor", "count")?;
    let outside = sandbox.at("escaped");
    let lines = format!(
        "add('../../escaped', b'x')\nadd({:?}, b'x')\nadd('ok.txt', b'fine\\n')\n\
         link = tarfile.TarInfo('link')\nlink.type = tarfile.SYMTYPE\nlink.linkname = '/etc/passwd'\narchive.addfile(link)",
        outside.to_str().context("path")?
    );
    sandbox.attach("evil.tar.gz", &archive(&lines)?)?;
    assert_eq!(sandbox.run()?.status.code(), Some(0));
    assert!(!outside.exists());
    assert_eq!(sandbox.report()?["files"], json!(1));
    assert!(sandbox.result()?.contains("3 members of evil.tar.gz were left out"), "{}", sandbox.result()?);
    Ok(())
}

#[test]
fn surveyor_says_what_it_could_not_read() -> Result<()> {
    let sandbox = Sandbox::new("surveyor", "count")?;
    let done = sandbox.run()?;
    assert_eq!((done.status.code(), String::from_utf8(done.stderr)?.contains("no file is attached")), (Some(1), true));
    let mut cut = archive("add('a.rs', b'x\\n' * 100000)")?;
    cut.truncate(cut.len() / 2);
    sandbox.attach("cut.tar.gz", &cut)?;
    assert_eq!(sandbox.run()?.status.code(), Some(0));
    assert!(sandbox.result()?.contains("cut.tar.gz cannot be unpacked"), "{}", sandbox.result()?);
    Ok(())
}
