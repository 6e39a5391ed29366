//! The channel definition: what people write as TOML or JSON, and its checks. Unknown keys are refused.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::limit::{CHANNEL_RULES, MESSAGES_PER_CHANNEL_MINUTE, MESSAGES_PER_THREAD_HOUR};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChannelDefinition {
    /// 1 to 63 characters: lower-case letters, digits and dashes, beginning with a letter.
    pub name: String,
    /// The agent of messages that no rule names one for.
    pub agent: String,
    /// The first that fits decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    #[serde(default)]
    pub access: Access,
    /// Whom `internal` lets in beside `users`: addresses, or domains as `example.org`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
    /// Verified authors who act as a user of the tenant: address to the user's name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub users: BTreeMap<String, String>,
    /// Runs and steers that one thread may cause in an hour before nothing more is taken from it: two programs that answer each other.
    #[serde(default = "messages_per_hour")]
    pub messages_per_hour: u32,
    /// Runs and steers that the whole channel may cause in a minute; what comes beyond waits its turn.
    #[serde(default = "messages_per_minute")]
    pub messages_per_minute: u32,
    /// Whether the first message of a thread is acknowledged with its run, unless the answer itself follows within seconds.
    #[serde(default = "yes")]
    pub acknowledge: bool,
    /// Where the channel's owner is told what nobody else hears of: an answer that was given up, a thread that was stopped. An http or https URL, by Standard
    /// Webhooks, signed with the secret `notify_secret` when there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notify: Option<String>,
    /// A mail channel. (More kinds will stand beside it; a channel is of one kind.)
    pub mail: MailChannel,
    /// Secrets by name: `hook_password` (for POST /hooks/…), `smtp_password`, `notify_secret`. Stored encrypted and never shown again; one that
    /// is left out stays as it was.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, SecretText>,
}

/// A secret on its way in: never printed, not even by mistake.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SecretText(pub String);

impl std::fmt::Debug for SecretText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

fn messages_per_hour() -> u32 {
    MESSAGES_PER_THREAD_HOUR
}

fn messages_per_minute() -> u32 {
    MESSAGES_PER_CHANNEL_MINUTE
}

fn yes() -> bool {
    true
}

/// Who may start and steer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Access {
    /// Verified authors named in `users`.
    #[default]
    Private,
    /// Those, and verified authors of `members`, who act as the channel.
    Internal,
    /// Everybody, verified or not; unknown ones act as the channel.
    Public,
}

/// Chooses an agent. A key that is left out fits everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Rule {
    /// The address that it was sent to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The author: an address, or a domain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    pub agent: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MailChannel {
    /// Addresses that this channel takes mail for, each of one channel only. Answers come from the first.
    pub addresses: Vec<String>,
    /// The name that the mail server in front writes into `Authentication-Results`; its findings are then believed. Without one DKIM and DMARC are checked here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authserv_id: Option<String>,
    pub smtp: Smtp,
}

/// Where answers are handed in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Smtp {
    pub host: String,
    #[serde(default = "submission")]
    pub port: u16,
    #[serde(default)]
    pub tls: Tls,
    /// With the secret `smtp_password`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

fn submission() -> u16 {
    587
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Tls {
    /// Required, begun by STARTTLS.
    #[default]
    Starttls,
    /// From the first byte (port 465).
    Implicit,
    /// None: only for a server on the same machine or network.
    None,
}

/// Secrets that a channel may have.
pub const SECRETS: [&str; 3] = ["hook_password", "smtp_password", "notify_secret"];

impl ChannelDefinition {
    /// The first thing that is wrong, in words for whoever wrote it.
    pub fn check(&self) -> Result<(), String> {
        if !crate::agent::is_name(&self.name) {
            return Err("name: use 1 to 63 lower-case letters, digits and dashes, beginning with a letter".to_owned());
        }
        if self.rules.len() > CHANNEL_RULES || self.members.len() > CHANNEL_RULES || self.users.len() > CHANNEL_RULES {
            return Err(format!("rules, members, users: at most {CHANNEL_RULES} each"));
        }
        if self.mail.addresses.is_empty() || self.mail.addresses.len() > CHANNEL_RULES {
            return Err(format!("mail.addresses: from 1 to {CHANNEL_RULES}"));
        }
        for address in &self.mail.addresses {
            if !is_address(address) || address.contains('+') {
                return Err(format!("mail.addresses: `{address}` is no address as `agent@example.org`, in lower case and without `+`"));
            }
        }
        // An author's address is compared in lower case.
        let compared = self.members.iter().chain(self.rules.iter().flat_map(|rule| rule.to.iter().chain(&rule.from)));
        if let Some(upper) = compared.into_iter().find(|text| text.chars().any(char::is_uppercase)) {
            return Err(format!("rules, members: write `{upper}` in lower case"));
        }
        for address in self.users.keys() {
            if !is_address(address) {
                return Err(format!("users: `{address}` is no address as `ann@example.org` in lower case"));
            }
        }
        if self.mail.smtp.user.is_none() && self.secrets.contains_key("smtp_password") {
            return Err("mail.smtp.user: it is missing, but secrets hold smtp_password".to_owned());
        }
        if self.mail.smtp.host.is_empty() {
            return Err("mail.smtp.host: it is empty".to_owned());
        }
        if self.messages_per_hour == 0 || self.messages_per_minute == 0 {
            return Err("messages_per_hour, messages_per_minute: at least 1; `towpath channel pause` stops a channel".to_owned());
        }
        match self.secrets.iter().find(|(name, value)| !SECRETS.contains(&name.as_str()) || value.0.is_empty()) {
            Some((name, _)) => Err(format!("secrets: `{name}` is empty or unknown; there are {}", SECRETS.join(", "))),
            None => Ok(()),
        }
    }
}

fn is_address(text: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty() && part.chars().all(|c| !c.is_whitespace() && !c.is_control() && !c.is_uppercase() && !"<>,;\"@".contains(c))
    };
    text.split_once('@').is_some_and(|(local, domain)| plain(local) && plain(domain)) && text.len() <= 254
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel() -> ChannelDefinition {
        serde_json::from_str(
            r#"{"name": "mail", "agent": "helper", "mail": {"addresses": ["agent@example.org"], "smtp": {"host": "mx.example.org"}}}"#,
        )
        .expect("definition")
    }

    #[test]
    fn the_least_definition_is_closed_to_strangers_and_speaks_tls() {
        let channel = channel();
        assert_eq!(channel.check(), Ok(()));
        assert_eq!((channel.access, channel.mail.smtp.tls, channel.mail.smtp.port), (Access::Private, Tls::Starttls, 587));
    }

    #[test]
    fn a_secret_is_never_printed() {
        let mut channel = channel();
        channel.secrets.insert("hook_password".to_owned(), SecretText("open sesame".to_owned()));
        assert!(!format!("{channel:?}").contains("sesame"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |change: fn(&mut ChannelDefinition), word: &str| {
            let mut channel = channel();
            change(&mut channel);
            let error = channel.check().expect_err(word);
            assert!(error.contains(word), "{error}");
        };
        wrong(|channel| channel.name = "Mail".to_owned(), "name");
        wrong(|channel| channel.mail.addresses.clear(), "mail.addresses");
        wrong(|channel| channel.mail.addresses = vec!["Agent@example.org".to_owned()], "lower case");
        wrong(|channel| channel.mail.addresses = vec!["agent+x@example.org".to_owned()], "without `+`");
        wrong(
            |channel| drop(channel.secrets.insert("pasword".to_owned(), SecretText("x".to_owned()))),
            "there are hook_password, smtp_password, notify_secret",
        );
        wrong(|channel| drop(channel.secrets.insert("smtp_password".to_owned(), SecretText("x".to_owned()))), "mail.smtp.user");
        wrong(|channel| channel.messages_per_minute = 0, "at least 1");
        wrong(|channel| channel.members = vec!["Example.org".to_owned()], "lower case");
        wrong(|channel| drop(channel.users.insert("ann".to_owned(), "ann".to_owned())), "users");
    }
}
