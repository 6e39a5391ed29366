//! The roles of the one binary.

use std::{path::PathBuf, process::ExitCode};

use towpath_supervisor::{init, launch, outside, wall};

const USAGE: &str = "usage: towpath-supervisor launch|outside --dir DIR\n       (the roles `wall` and `init` are started by `outside`)";

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let role = arguments.next().and_then(|role| role.into_string().ok()).unwrap_or_default();
    let rest: Vec<_> = arguments.collect();
    match role.as_str() {
        "launch" | "outside" => match rest.as_slice() {
            [flag, dir] if flag == "--dir" => {
                let dir = PathBuf::from(dir);
                if role == "launch" { launch::run(&dir) } else { outside::run(&dir) }
            }
            _ => usage(),
        },
        "wall" => wall::run(),
        "init" => {
            let words: Option<Vec<String>> = rest.into_iter().map(|word| word.into_string().ok()).collect();
            words.and_then(|words| init::InitArguments::parse(&words)).map_or_else(usage, init::run)
        }
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(64)
}
