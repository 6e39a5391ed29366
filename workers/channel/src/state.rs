//! What becomes of a message before anything is looked up. Pure.

use towpath_schemas::{
    channel::{Access, ChannelDefinition},
    id::DeliveryId,
};

use crate::mail::read::{Automatic, Mail};

/// Where a message goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Door {
    /// Nobody is waiting for an answer.
    Ignore(String),
    /// Deliveries of ours that came back, and why if the report says so.
    Bounced(Vec<DeliveryId>, Option<String>),
    /// Somebody may not, and why.
    Refuse(String),
    Come {
        who: Who,
        agent: String,
    },
}

/// As whom an author acts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Who {
    /// The tenant's user of that name.
    User(String),
    /// The channel's system actor.
    Channel,
}

/// `verified`: the author is known to be who the mail says. `to` are the envelope's recipients, without what stands behind a `+`.
pub fn door(channel: &ChannelDefinition, mail: &Mail, verified: bool, to: &[String]) -> Door {
    match &mail.automatic {
        Some(Automatic::Bounce { of, why }) => return Door::Bounced(of.iter().filter_map(|id| delivery_of(id)).collect(), why.clone()),
        Some(Automatic::Marked(what)) => return Door::Ignore(format!("automatic mail: {what}")),
        None => {}
    }
    let Some(author) = mail.from.as_deref() else {
        return Door::Refuse("it has no author, or more than one".to_owned());
    };
    if channel.mail.addresses.iter().any(|address| address == author) {
        return Door::Ignore("it comes from an address of this channel".to_owned());
    }
    let who = match who(channel, author, verified) {
        Ok(who) => who,
        Err(reason) => return Door::Refuse(reason),
    };
    let fits = |wanted: &Option<String>, is: &dyn Fn(&str) -> bool| wanted.as_deref().is_none_or(is);
    let rule = channel
        .rules
        .iter()
        .find(|rule| fits(&rule.to, &|wanted| to.iter().any(|to| to == wanted)) && fits(&rule.from, &|wanted| is_of(author, wanted)));
    Door::Come { who, agent: rule.map_or_else(|| channel.agent.clone(), |rule| rule.agent.clone()) }
}

fn who(channel: &ChannelDefinition, author: &str, verified: bool) -> Result<Who, String> {
    let user = channel.users.get(author).filter(|_| verified);
    match (user, channel.access) {
        (Some(user), _) => Ok(Who::User(user.clone())),
        (None, Access::Public) => Ok(Who::Channel),
        (None, Access::Private | Access::Internal) if !verified => Err(format!(
            "nobody vouches that {author} wrote it: DMARC did not pass, or the channel believes no mail server (mail.authserv_id)"
        )),
        (None, Access::Internal) if channel.members.iter().any(|member| is_of(author, member)) => Ok(Who::Channel),
        (None, Access::Internal) => Err(format!("{author} is neither in `users` nor in `members` of this channel")),
        (None, Access::Private) => Err(format!("{author} is not in `users` of this channel")),
    }
}

/// Whether an address is that address, or of that domain.
fn is_of(address: &str, wanted: &str) -> bool {
    match wanted.contains('@') {
        true => address == wanted,
        false => address.rsplit_once('@').is_some_and(|(_, domain)| domain == wanted),
    }
}

/// Our Message-IDs are `<delivery>.<part>@<domain>`.
fn delivery_of(message_id: &str) -> Option<DeliveryId> {
    message_id.split_once('.')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use towpath_schemas::channel::Rule;

    use super::*;
    use crate::mail::read;

    fn channel(access: Access) -> ChannelDefinition {
        let mut channel: ChannelDefinition = serde_json::from_str(
            r#"{"name": "mail", "agent": "helper", "users": {"ann@corp.org": "ann"}, "members": ["corp.org", "guest@else.org"],
                "mail": {"addresses": ["agent@example.org", "coder@example.org"], "smtp": {"host": "mx"}}}"#,
        )
        .expect("channel");
        channel.access = access;
        channel
    }

    fn from(author: &str) -> Mail {
        read::read("sender@x.org", format!("From: {author}\r\nSubject: hi\r\n\r\nx").as_bytes()).expect("mail")
    }

    #[test]
    fn only_a_verified_author_acts_as_a_known_user() {
        let who = |access, author: &str, verified| match door(&channel(access), &from(author), verified, &[]) {
            Door::Come { who, .. } => Some(who),
            Door::Refuse(_) => None,
            other => panic!("{other:?}"),
        };
        let ann = Some(Who::User("ann".to_owned()));
        for access in [Access::Private, Access::Internal, Access::Public] {
            assert_eq!(who(access, "ann@corp.org", true), ann);
        }
        assert_eq!(who(Access::Private, "ann@corp.org", false), None);
        assert_eq!(who(Access::Internal, "ann@corp.org", false), None);
        assert_eq!(who(Access::Public, "ann@corp.org", false), Some(Who::Channel));
        assert_eq!(who(Access::Private, "bob@corp.org", true), None);
        assert_eq!(who(Access::Internal, "bob@corp.org", true), Some(Who::Channel));
        assert_eq!(who(Access::Internal, "guest@else.org", true), Some(Who::Channel));
        assert_eq!(who(Access::Internal, "other@else.org", true), None);
        assert_eq!(who(Access::Internal, "bob@evilcorp.org", true), None);
    }

    #[test]
    fn the_first_rule_that_fits_chooses_the_agent() {
        let mut channel = channel(Access::Public);
        channel.rules = vec![
            Rule { to: Some("coder@example.org".to_owned()), from: Some("corp.org".to_owned()), agent: "insider".to_owned() },
            Rule { to: Some("coder@example.org".to_owned()), from: None, agent: "coder".to_owned() },
        ];
        let agent = |author, to: &str| match door(&channel, &from(author), true, &[to.to_owned()]) {
            Door::Come { agent, .. } => agent,
            other => panic!("{other:?}"),
        };
        assert_eq!(agent("bob@corp.org", "coder@example.org"), "insider");
        assert_eq!(agent("bob@else.org", "coder@example.org"), "coder");
        assert_eq!(agent("bob@corp.org", "agent@example.org"), "helper");
    }

    #[test]
    fn own_addresses_automatic_mail_and_bounces_start_nothing_c5_c7() {
        let channel = channel(Access::Public);
        assert!(matches!(door(&channel, &from("coder@example.org"), true, &[]), Door::Ignore(_)));
        let mut automatic = from("bob@corp.org");
        automatic.automatic = Some(Automatic::Marked("Auto-Submitted".to_owned()));
        assert!(matches!(door(&channel, &automatic, true, &[]), Door::Ignore(_)));
        let delivery = DeliveryId::mint();
        automatic.automatic = Some(Automatic::Bounce { of: vec![format!("{delivery}.1@example.org"), "else@x".to_owned()], why: None });
        assert_eq!(door(&channel, &automatic, true, &[]), Door::Bounced(vec![delivery], None));
        assert!(matches!(door(&channel, &from("a@x.org, b@x.org"), true, &[]), Door::Refuse(_)));
    }
}
