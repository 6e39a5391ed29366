//! `towpath login` and its kin: several servers under names of one's own, kept in `$XDG_CONFIG_HOME/towpath/contexts.toml`, readable by its owner only.

use std::{
    collections::BTreeMap,
    fs,
    io::{IsTerminal, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::PathBuf,
};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::{Global, api::Api, failure::Failure, print::Printer};

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Contexts {
    /// The one that is used when none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    #[serde(default)]
    contexts: BTreeMap<String, Context>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    pub url: String,
    pub token: String,
}

#[derive(Args)]
#[command(
    after_help = "Examples:\n  towpath login prod --url https://towpath.example.com < token\n  towpath login            # which ones there are, and which is used\n  towpath use prod\n  towpath runs --context staging"
)]
pub struct LoginArgs {
    /// A name for it; without one the servers that are known are listed. The URL comes from --url, the token from --token or stdin.
    name: Option<String>,
}

#[derive(Args)]
pub struct NameArg {
    /// The name that it was given by `towpath login`.
    name: String,
}

fn path() -> Result<PathBuf, Failure> {
    let folder = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = folder.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    folder.map(|folder| folder.join("towpath/contexts.toml")).ok_or_else(|| Failure::Use("HOME is not set".to_owned()))
}

fn load() -> Result<Contexts, Failure> {
    let path = path()?;
    match fs::read_to_string(&path) {
        Ok(text) => toml::from_str(&text).map_err(|error| Failure::Use(format!("{}: {error}", path.display()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Contexts::default()),
        Err(error) => Err(Failure::local(path.display(), &error)),
    }
}

/// Written beside and renamed, so that a crash leaves the old one.
fn save(contexts: &Contexts) -> Result<(), Failure> {
    let path = path()?;
    let fail = |error: std::io::Error| Failure::local(path.display(), &error);
    let folder = path.parent().ok_or_else(|| Failure::Use("no folder for settings".to_owned()))?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(fail)?;
    let text = toml::to_string(contexts).map_err(|error| Failure::Use(error.to_string()))?;
    let unfinished = path.with_extension("toml.new");
    let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&unfinished).map_err(fail)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(fail)?;
    fs::rename(&unfinished, &path).map_err(fail)
}

/// The context that is asked for, or the current one; None when there is none.
pub fn chosen(name: Option<&str>) -> Result<Option<Context>, Failure> {
    let contexts = match load() {
        Ok(contexts) => contexts,
        // Without a home nobody has logged in.
        Err(_) if name.is_none() && std::env::var_os("HOME").is_none() => return Ok(None),
        Err(failure) => return Err(failure),
    };
    match name {
        Some(name) => contexts.contexts.get(name).cloned().map(Some).ok_or_else(|| unknown(name, &contexts)),
        None => Ok(contexts.current.and_then(|name| contexts.contexts.get(&name).cloned())),
    }
}

fn unknown(name: &str, contexts: &Contexts) -> Failure {
    let known: Vec<&str> = contexts.contexts.keys().map(String::as_str).collect();
    let known = if known.is_empty() {
        "there is none yet: towpath login NAME --url URL".to_owned()
    } else {
        format!("there are {}", known.join(", "))
    };
    Failure::Use(format!("no server is named `{name}`; {known}"))
}

pub async fn login(global: &Global, printer: &Printer, args: LoginArgs) -> Result<(), Failure> {
    let Some(name) = args.name else { return list(printer) };
    let url = global.url.clone().ok_or_else(|| Failure::Use("say which server: --url https://towpath.example.com".to_owned()))?;
    let token = match &global.token {
        Some(token) => token.clone(),
        None => token_from_stdin(printer)?,
    };
    let api = Api::new(&url, Some(token.clone()))?;
    // A token that does not work is not kept.
    api.get(&["v1", "agents"], &[]).await?;
    let mut contexts = load()?;
    contexts.contexts.insert(name.clone(), Context { url: url.clone(), token });
    contexts.current = Some(name.clone());
    save(&contexts)?;
    printer.note(&format!("{name} is {url}, and is used from now on"));
    Ok(())
}

fn token_from_stdin(printer: &Printer) -> Result<String, Failure> {
    let stdin = std::io::stdin();
    let mut text = String::new();
    if stdin.is_terminal() {
        printer.note("token (it is shown while you type; or pipe it in):");
        stdin.read_line(&mut text)
    } else {
        stdin.lock().take(4096).read_to_string(&mut text)
    }
    .map_err(|error| Failure::local("stdin", &error))?;
    let token = text.trim().to_owned();
    if token.is_empty() { Err(Failure::Use("no token came: give --token, or pipe it in".to_owned())) } else { Ok(token) }
}

fn list(printer: &Printer) -> Result<(), Failure> {
    let contexts = load()?;
    if printer.json {
        let servers: BTreeMap<&String, &String> = contexts.contexts.iter().map(|(name, context)| (name, &context.url)).collect();
        printer.out(&format!("{:#}\n", serde_json::json!({ "current": contexts.current, "servers": servers })));
        return Ok(());
    }
    if contexts.contexts.is_empty() {
        printer.note("no server yet: towpath login NAME --url URL");
        return Ok(());
    }
    let row = |(name, context): (&String, &Context)| {
        let mark = if contexts.current.as_ref() == Some(name) { "*" } else { "" };
        vec![mark.to_owned(), name.clone(), context.url.clone()]
    };
    printer.out(&printer.table(&["", "name", "url"], contexts.contexts.iter().map(row).collect()));
    Ok(())
}

pub fn switch(printer: &Printer, args: NameArg) -> Result<(), Failure> {
    let mut contexts = load()?;
    let Some(context) = contexts.contexts.get(&args.name) else { return Err(unknown(&args.name, &contexts)) };
    printer.note(&format!("{} is used from now on: {}", args.name, context.url));
    contexts.current = Some(args.name);
    save(&contexts)
}

pub fn logout(printer: &Printer, args: NameArg) -> Result<(), Failure> {
    let mut contexts = load()?;
    if contexts.contexts.remove(&args.name).is_none() {
        return Err(unknown(&args.name, &contexts));
    }
    if contexts.current.as_ref() == Some(&args.name) {
        contexts.current = None;
    }
    save(&contexts)?;
    printer.note(&format!("{} is forgotten here; its token still works until it is revoked: towpath tokens revoke", args.name));
    Ok(())
}
