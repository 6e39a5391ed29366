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
    /// Whom `internal` lets in beside `users`: addresses, or domains as `example.org`; of Slack user ids, or workspaces as `T024BE7LD`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<String>,
    /// Verified authors who act as a user of the tenant: address, or Slack user id, to the user's name.
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
    /// A mail channel. Of the kinds `mail` and `slack` a channel has exactly one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mail: Option<MailChannel>,
    /// A Slack app.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slack: Option<SlackChannel>,
    /// Secrets by name: `notify_secret`; of mail `hook_password` (for POST /hooks/…) and `smtp_password`; of Slack `signing_secret` and `bot_token`.
    /// Stored encrypted and never shown again; one that is left out stays as it was.
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
    /// Where it was sent to: an address, or the id of a Slack channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The author: an address or a domain, a Slack user or workspace id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    pub agent: String,
}

/// What a channel speaks.
#[derive(Debug, Clone, Copy)]
pub enum Kind<'a> {
    Mail(&'a MailChannel),
    Slack(&'a SlackChannel),
}

/// A Slack app that posts its events to the channel's hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlackChannel {
    /// Where its Web API is; another one for GovSlack.
    #[serde(default = "slack_api")]
    pub api: String,
}

fn slack_api() -> String {
    "https://slack.com/api".to_owned()
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

/// Secrets of every channel, and of each kind.
const SECRETS: [&str; 1] = ["notify_secret"];
const MAIL_SECRETS: [&str; 2] = ["hook_password", "smtp_password"];
const SLACK_SECRETS: [&str; 2] = ["signing_secret", "bot_token"];

impl ChannelDefinition {
    /// None for a kind that only a newer release knows.
    pub fn kind(&self) -> Option<Kind<'_>> {
        match (&self.mail, &self.slack) {
            (Some(mail), None) => Some(Kind::Mail(mail)),
            (None, Some(slack)) => Some(Kind::Slack(slack)),
            (None, None) | (Some(_), Some(_)) => None,
        }
    }

    /// The addresses that it takes mail for.
    pub fn addresses(&self) -> &[String] {
        self.mail.as_ref().map_or(&[], |mail| &mail.addresses)
    }

    /// In a few words where messages of it come from.
    pub fn place(&self) -> String {
        match self.kind() {
            Some(Kind::Mail(mail)) => format!("mail for {}", mail.addresses.join(", ")),
            Some(Kind::Slack(_)) => "messages of its Slack app".to_owned(),
            None => "messages of a kind that this release does not know".to_owned(),
        }
    }

    /// Secrets that it may have, and those of them that it cannot do without.
    pub fn secret_names(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        let (more, needed): (&[&str], Vec<&str>) = match self.kind() {
            Some(Kind::Mail(mail)) => (&MAIL_SECRETS, if mail.smtp.user.is_some() { vec!["smtp_password"] } else { Vec::new() }),
            Some(Kind::Slack(_)) => (&SLACK_SECRETS, SLACK_SECRETS.to_vec()),
            None => (&[], Vec::new()),
        };
        (SECRETS.iter().chain(more).copied().collect(), needed)
    }

    /// The first thing that is wrong, in words for whoever wrote it.
    pub fn check(&self) -> Result<(), String> {
        if !crate::agent::is_name(&self.name) {
            return Err("name: use 1 to 63 lower-case letters, digits and dashes, beginning with a letter".to_owned());
        }
        if self.rules.len() > CHANNEL_RULES || self.members.len() > CHANNEL_RULES || self.users.len() > CHANNEL_RULES {
            return Err(format!("rules, members, users: at most {CHANNEL_RULES} each"));
        }
        match self.kind() {
            Some(Kind::Mail(mail)) => self.check_mail(mail)?,
            Some(Kind::Slack(slack)) => self.check_slack(slack)?,
            None => return Err("mail, slack: a channel has exactly one of them".to_owned()),
        }
        if self.messages_per_hour == 0 || self.messages_per_minute == 0 {
            return Err("messages_per_hour, messages_per_minute: at least 1; `towpath channel pause` stops a channel".to_owned());
        }
        let (names, _) = self.secret_names();
        match self.secrets.iter().find(|(name, value)| !names.contains(&name.as_str()) || value.0.is_empty()) {
            Some((name, _)) => Err(format!("secrets: `{name}` is empty or unknown; there are {}", names.join(", "))),
            None => Ok(()),
        }
    }

    fn check_mail(&self, mail: &MailChannel) -> Result<(), String> {
        if mail.addresses.is_empty() || mail.addresses.len() > CHANNEL_RULES {
            return Err(format!("mail.addresses: from 1 to {CHANNEL_RULES}"));
        }
        for address in &mail.addresses {
            if !is_address(address) || address.contains('+') {
                return Err(format!("mail.addresses: `{address}` is no address as `agent@example.org`, in lower case and without `+`"));
            }
        }
        // An author's address is compared in lower case.
        if let Some(upper) = self.compared().find(|text| text.chars().any(char::is_uppercase)) {
            return Err(format!("rules, members: write `{upper}` in lower case"));
        }
        for address in self.users.keys() {
            if !is_address(address) {
                return Err(format!("users: `{address}` is no address as `ann@example.org` in lower case"));
            }
        }
        if mail.smtp.user.is_none() && self.secrets.contains_key("smtp_password") {
            return Err("mail.smtp.user: it is missing, but secrets hold smtp_password".to_owned());
        }
        if mail.smtp.host.is_empty() {
            return Err("mail.smtp.host: it is empty".to_owned());
        }
        Ok(())
    }

    fn check_slack(&self, slack: &SlackChannel) -> Result<(), String> {
        if !slack.api.starts_with("https://") && !slack.api.starts_with("http://") {
            return Err(format!("slack.api: `{}` is no http or https URL", slack.api));
        }
        for user in self.users.keys() {
            if !is_slack_id(user) || !user.starts_with(['U', 'W']) {
                return Err(format!("users: `{user}` is no Slack user id as `U012AB3CD` (in a person's profile: Copy member ID)"));
            }
        }
        match self.compared().find(|text| !is_slack_id(text)) {
            Some(text) => Err(format!("rules, members: `{text}` is no Slack id as `U012AB3CD`, `T024BE7LD` or `C012AB3CD`")),
            None => Ok(()),
        }
    }

    /// What authors and places are compared with.
    fn compared(&self) -> impl Iterator<Item = &String> {
        self.members.iter().chain(self.rules.iter().flat_map(|rule| rule.to.iter().chain(&rule.from)))
    }
}

fn is_slack_id(text: &str) -> bool {
    text.len() >= 2 && text.len() <= 32 && text.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit())
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
        let smtp = channel.mail.expect("mail").smtp;
        assert_eq!((channel.access, smtp.tls, smtp.port), (Access::Private, Tls::Starttls, 587));
    }

    #[test]
    fn a_secret_is_never_printed() {
        let mut channel = channel();
        channel.secrets.insert("hook_password".to_owned(), SecretText("open sesame".to_owned()));
        assert!(!format!("{channel:?}").contains("sesame"));
    }

    fn addresses(channel: &mut ChannelDefinition) -> &mut Vec<String> {
        &mut channel.mail.as_mut().expect("mail").addresses
    }

    #[test]
    fn a_slack_channel_names_people_by_their_ids_and_has_no_secrets_of_mail() {
        let mut channel: ChannelDefinition = serde_json::from_str(
            r#"{"name": "slack", "agent": "helper", "members": ["T024BE7LD"], "users": {"U012AB3CD": "ann"}, "slack": {}}"#,
        )
        .expect("definition");
        assert_eq!(channel.check(), Ok(()));
        assert_eq!(channel.secret_names(), (vec!["notify_secret", "signing_secret", "bot_token"], vec!["signing_secret", "bot_token"]));
        channel.members = vec!["example.org".to_owned()];
        assert!(channel.check().expect_err("an id").contains("no Slack id"));
        channel.members.clear();
        channel.users = [("ann@example.org".to_owned(), "ann".to_owned())].into();
        assert!(channel.check().expect_err("a user id").contains("no Slack user id"));
        channel.users.clear();
        channel.secrets.insert("smtp_password".to_owned(), SecretText("x".to_owned()));
        assert!(channel.check().expect_err("a secret").contains("signing_secret"));
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
        wrong(|channel| addresses(channel).clear(), "mail.addresses");
        wrong(|channel| *addresses(channel) = vec!["Agent@example.org".to_owned()], "lower case");
        wrong(|channel| *addresses(channel) = vec!["agent+x@example.org".to_owned()], "without `+`");
        wrong(|channel| channel.mail = None, "exactly one");
        wrong(|channel| channel.slack = Some(SlackChannel { api: slack_api() }), "exactly one");
        wrong(
            |channel| drop(channel.secrets.insert("pasword".to_owned(), SecretText("x".to_owned()))),
            "there are notify_secret, hook_password, smtp_password",
        );
        wrong(|channel| drop(channel.secrets.insert("smtp_password".to_owned(), SecretText("x".to_owned()))), "mail.smtp.user");
        wrong(|channel| channel.messages_per_minute = 0, "at least 1");
        wrong(|channel| channel.members = vec!["Example.org".to_owned()], "lower case");
        wrong(|channel| drop(channel.users.insert("ann".to_owned(), "ann".to_owned())), "users");
    }
}
