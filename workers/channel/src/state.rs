//! What becomes of a message before anything is looked up. Pure.

use towpath_schemas::{
    channel::{Access, ChannelDefinition},
    id::DeliveryId,
};

use crate::message::{Automatic, Message};

/// Where a message goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Door {
    /// Nobody is waiting for an answer.
    Ignore(String),
    /// Deliveries of ours that came back, and why.
    Bounced(Vec<DeliveryId>, String),
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

/// `verified`: the author is known to be who the message says.
pub fn door(channel: &ChannelDefinition, message: &Message, verified: bool) -> Door {
    match &message.automatic {
        Some(Automatic::Bounce { of, why }) => return Door::Bounced(of.clone(), why.clone()),
        Some(Automatic::Marked(what)) => return Door::Ignore(what.clone()),
        None => {}
    }
    let Some(author) = message.author.as_deref() else {
        return Door::Refuse("it has no author, or more than one".to_owned());
    };
    let is_of = |wanted: &String| wanted == author || message.groups.contains(wanted);
    let who = match who(channel, author, verified, channel.members.iter().any(is_of)) {
        Ok(who) => who,
        Err(reason) => return Door::Refuse(reason),
    };
    let rule = channel
        .rules
        .iter()
        .find(|rule| rule.to.as_ref().is_none_or(|wanted| message.to.contains(wanted)) && rule.from.as_ref().is_none_or(is_of));
    Door::Come { who, agent: rule.map_or_else(|| channel.agent.clone(), |rule| rule.agent.clone()) }
}

fn who(channel: &ChannelDefinition, author: &str, verified: bool, is_member: bool) -> Result<Who, String> {
    let user = channel.users.get(author).filter(|_| verified);
    match (user, channel.access) {
        (Some(user), _) => Ok(Who::User(user.clone())),
        (None, Access::Public) => Ok(Who::Channel),
        (None, Access::Private | Access::Internal) if !verified => Err(format!(
            "nobody vouches that {author} wrote it: DMARC did not pass, or the channel believes no mail server (mail.authserv_id)"
        )),
        (None, Access::Internal) if is_member => Ok(Who::Channel),
        (None, Access::Internal) => Err(format!("{author} is neither in `users` nor in `members` of this channel")),
        (None, Access::Private) => Err(format!("{author} is not in `users` of this channel")),
    }
}

#[cfg(test)]
mod tests {
    use towpath_schemas::channel::Rule;

    use super::*;
    use crate::mail;

    fn channel(access: Access) -> ChannelDefinition {
        let mut channel: ChannelDefinition = serde_json::from_str(
            r#"{"name": "mail", "agent": "helper", "users": {"ann@corp.org": "ann"}, "members": ["corp.org", "guest@else.org"],
                "mail": {"addresses": ["agent@example.org", "coder@example.org"], "smtp": {"host": "mx"}}}"#,
        )
        .expect("channel");
        channel.access = access;
        channel
    }

    fn mail(author: &str, headers: &str, to: &str) -> Message {
        let mail = mail::read::read("sender@x.org", format!("From: {author}\r\n{headers}\r\nx").as_bytes()).expect("mail");
        mail::of(channel(Access::Public).mail.as_ref().expect("mail"), mail, vec![to.to_owned()], None)
    }

    fn from(author: &str) -> Message {
        mail(author, "", "agent@example.org")
    }

    #[test]
    fn only_a_verified_author_acts_as_a_known_user() {
        let who = |access, author: &str, verified| match door(&channel(access), &from(author), verified) {
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
        let agent = |author, to: &str| match door(&channel, &mail(author, "", to), true) {
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
        assert!(matches!(door(&channel, &from("coder@example.org"), true), Door::Ignore(_)));
        let automatic = mail("bob@corp.org", "Auto-Submitted: auto-replied\r\n", "agent@example.org");
        assert!(matches!(door(&channel, &automatic, true), Door::Ignore(_)));
        let delivery = DeliveryId::mint();
        let report = format!(
            "Content-Type: multipart/report; report-type=delivery-status; boundary=b\r\n\r\n--b\r\n\r\nIt failed.\r\n\
             --b\r\nContent-Type: text/rfc822-headers\r\n\r\nMessage-ID: <{delivery}.1@example.org>\r\n--b--\r\n"
        );
        let bounce = mail("mailer-daemon@x.org", &report, "agent@example.org");
        assert_eq!(door(&channel, &bounce, true), Door::Bounced(vec![delivery], "It failed.".to_owned()));
        assert!(matches!(door(&channel, &from("a@x.org, b@x.org"), true), Door::Refuse(_)));
    }
}
