//! The agent definition: what people write as TOML or JSON, its defaults and its checks. Unknown keys are refused.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::limit::{FENCE_LEAST_S, FENCE_MOST_S, PROMPT_BYTES, TRANSCRIPT_BYTES, TRANSCRIPT_BYTES_LEAST};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AgentDefinition {
    /// 1 to 63 characters: lower-case letters, digits and dashes, beginning with a letter.
    pub name: String,
    #[serde(default)]
    pub description: String,
    /// What to execute: the program and its arguments, no shell in between.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The image to run, for backends that run images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The system prompt.
    #[serde(default)]
    pub instructions: String,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub mode: Mode,
    #[serde(default)]
    pub terminal: Option<Terminal>,
    #[serde(default)]
    pub workspace: Workspace,
    #[serde(default)]
    pub on_lost: OnLost,
    /// Seconds, 15 to 86400, after which a sandbox that hears from no gateway has ended its command by itself. Required with `on_lost = "restart"`; without it a sandbox that is
    /// cut off works on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence_after: Option<u32>,
    #[serde(default)]
    pub spool_full: SpoolFull,
    #[serde(default)]
    pub contract: Contract,
    #[serde(default)]
    pub steering: Steering,
    #[serde(default)]
    pub sandbox: Sandbox,
    #[serde(default)]
    pub limits: Limits,
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident),* $(,)? } default $default:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        pub enum $name { $($(#[$vdoc])* $variant),* }

        impl Default for $name {
            fn default() -> Self {
                Self::$default
            }
        }
    };
}

words!(Mode { /** Works by itself until it ends. */ OneShot, /** A person sits at its terminal. */ Interactive } default OneShot);
words!(Terminal { Pipes, Pty } default Pipes);
words!(/** Whether a session keeps its file tree. */ Workspace { Session, None } default Session);
words!(OnLost { Fail, Restart } default Fail);
words!(/** What happens when the spool is full. */ SpoolFull { /** The agent blocks. */ Block, /** Output is dropped and a gap marker says so. */ Gap } default Block);
words!(Contract { Towpath, Archestra } default Towpath);
words!(SteeringFormat { /** Every line is one message; line breaks become spaces. */ Text, /** Every line is `{"id","message","files"}`. */ Json } default Text);
words!(Backend { Process, Container, Kubernetes } default Process);
words!(/** How a process sandbox is walled off. */ Isolation { /** Namespaces of its own, an unprivileged user, a fixed list of read-only paths. */ Bubblewrap, /** None at all; to be written down. */ None } default Bubblewrap);

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Steering {
    #[serde(default)]
    pub format: SteeringFormat,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sandbox {
    #[serde(default)]
    pub backend: Backend,
    #[serde(default)]
    pub isolation: Isolation,
    /// Whether the sandbox reaches the network; never the host's loopback.
    #[serde(default)]
    pub egress: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
    /// Bytes that the workspace may hold; a run that goes over ends with the reason `disk_limit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Limits {
    /// Runs of this agent at a time, for each tenant.
    pub concurrent: Option<u32>,
    /// Seconds from admission to the bound supervisor.
    pub start_s: u32,
    /// Seconds without output or input.
    pub idle_s: Option<u32>,
    /// Seconds of work.
    pub max_s: Option<u32>,
    /// Seconds between TERM and KILL, at most 10.
    pub grace_s: u32,
    /// Bytes of output that are kept of each of a run's sandboxes, at least 1 MiB. Of more, a quarter of it from the beginning and the newest are kept; a gap marker
    /// stands for what was between.
    pub transcript_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { concurrent: None, start_s: 120, idle_s: None, max_s: None, grace_s: 5, transcript_bytes: TRANSCRIPT_BYTES }
    }
}

/// The first thing that is wrong with a definition: which key, and what to do.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{key}`: {help}")]
pub struct DefinitionError {
    pub key: &'static str,
    pub help: String,
}

impl AgentDefinition {
    /// What the command's input and output are when it runs in `mode`: a terminal for one that a person sits at, pipes otherwise, unless it is written down.
    pub fn terminal_in(&self, mode: Mode) -> Terminal {
        self.terminal.unwrap_or(if mode == Mode::Interactive { Terminal::Pty } else { Terminal::Pipes })
    }

    /// What may be checked without knowing the host; whether a host can enforce the walls is decided at admission.
    pub fn check(&self) -> Result<(), DefinitionError> {
        let refuse = |key, help: &str| Err(DefinitionError { key, help: help.to_owned() });
        if !is_name(&self.name) {
            return refuse("name", "use 1 to 63 lower-case letters, digits and dashes, beginning with a letter");
        }
        match self.sandbox.backend {
            Backend::Process if self.command.is_empty() => {
                return refuse("command", "the process backend needs a command, for example [\"/usr/bin/python3\", \"-c\", \"…\"]");
            }
            Backend::Process if self.image.is_some() => return refuse("image", "the process backend runs no images; leave it out"),
            Backend::Container | Backend::Kubernetes => {
                return refuse("sandbox.backend", "this release runs the process backend only; write backend = \"process\"");
            }
            Backend::Process => {}
        }
        if self.workspace == Workspace::None {
            return refuse("workspace", "the process backend keeps a workspace for each session; leave it out");
        }
        if self.command.iter().any(|part| part.contains('\0'))
            || self.env.iter().any(|(k, v)| k.contains(['\0', '=']) || k.is_empty() || v.contains('\0'))
        {
            return refuse("command", "commands and environment values cannot hold U+0000, and names no `=`");
        }
        if self.env.keys().any(|key| key.starts_with("TOWPATH_")) {
            return refuse("env", "names that begin with TOWPATH_ are Towpath's own");
        }
        if self.instructions.len() > PROMPT_BYTES {
            return refuse("instructions", "at most 1 MiB");
        }
        if self.instructions.contains('\0') || self.description.contains('\0') {
            return refuse("instructions", "U+0000 cannot be stored; remove it");
        }
        match self.fence_after {
            None if self.on_lost == OnLost::Restart => {
                return refuse(
                    "fence_after",
                    "a restart needs it, else a sandbox that is only cut off could run beside its successor; write fence_after = 120",
                );
            }
            Some(seconds) if !(FENCE_LEAST_S..=FENCE_MOST_S).contains(&seconds) => {
                return refuse("fence_after", "from 15 to 86400 seconds");
            }
            Some(_) | None => {}
        }
        if self.spool_full == SpoolFull::Gap || self.contract == Contract::Archestra {
            return refuse("spool_full", "this release knows spool_full = \"block\" and contract = \"towpath\" only");
        }
        let tiny = |limit: Option<u32>| limit.is_some_and(|limit| limit == 0 || i32::try_from(limit).is_err());
        if tiny(self.limits.concurrent) {
            return refuse("limits.concurrent", "at least 1");
        }
        if tiny(self.limits.max_s) {
            return refuse("limits.max_s", "at least 1 second");
        }
        if self.limits.idle_s == Some(0) {
            return refuse("limits.idle_s", "at least 1 second");
        }
        if self.limits.transcript_bytes < TRANSCRIPT_BYTES_LEAST || i64::try_from(self.limits.transcript_bytes).is_err() {
            return refuse("limits.transcript_bytes", "at least 1048576");
        }
        if self.limits.grace_s > 10 {
            return refuse("limits.grace_s", "at most 10 seconds");
        }
        if self.limits.start_s == 0 {
            return refuse("limits.start_s", "at least 1 second");
        }
        Ok(())
    }
}

/// Agent, channel and schedule names.
pub fn is_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn minimal() -> AgentDefinition {
        serde_json::from_str(r#"{"name":"echo","command":["/bin/true"]}"#).expect("parse")
    }

    #[test]
    fn a_minimal_definition_gets_the_listed_defaults() {
        let agent = minimal();
        assert_eq!(agent.check(), Ok(()));
        assert_eq!(agent.sandbox, Sandbox::default());
        assert_eq!((agent.limits.start_s, agent.limits.grace_s), (120, 5));
        assert_eq!(agent.sandbox.isolation, Isolation::Bubblewrap);
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = serde_json::from_str::<AgentDefinition>(r#"{"name":"a","comand":["x"]}"#).expect_err("unknown key");
        assert!(error.to_string().contains("comand"), "{error}");
    }

    #[test]
    fn what_this_release_cannot_enforce_is_refused_and_not_ignored() {
        for (key, change) in [
            ("sandbox.backend", r#"{"sandbox":{"backend":"container"}}"#),
            ("fence_after", r#"{"on_lost":"restart"}"#),
            ("fence_after", r#"{"fence_after":14}"#),
            ("fence_after", r#"{"fence_after":86401}"#),
            ("limits.max_s", r#"{"limits":{"max_s":0}}"#),
            ("limits.concurrent", r#"{"limits":{"concurrent":0}}"#),
            ("limits.grace_s", r#"{"limits":{"grace_s":11}}"#),
            ("limits.transcript_bytes", r#"{"limits":{"transcript_bytes":1048575}}"#),
        ] {
            let mut value = serde_json::to_value(minimal()).expect("value");
            let change: serde_json::Value = serde_json::from_str(change).expect("change");
            for (k, v) in change.as_object().expect("object") {
                value[k] = v.clone();
            }
            let agent: AgentDefinition = serde_json::from_value(value).expect("parse");
            assert_eq!(agent.check().map_err(|e| e.key), Err(key));
        }
    }
}
