//! Mail: reading what came, judging who wrote it, writing the answer and handing it in.

pub mod compose;
pub mod dmarc;
mod header;
pub mod quote;
pub mod read;
pub mod send;
mod smtp;
pub mod trust;

use tokio::task::spawn_blocking;
use towpath_chassis::{Chassis, Error, Result};
use towpath_schemas::{
    channel::{Access, ChannelDefinition, MailChannel},
    id::{DeliveryId, ThreadId},
};

use crate::{
    intake::table::Claimed,
    message::{Automatic, Head, Message},
    token,
};
use dmarc::Verdict;
use read::{Mail, Report};

/// The mail that came, for the room; Err(what is wrong with it) for one that nobody can take.
pub async fn message(chassis: &Chassis, claimed: &Claimed, channel: &MailChannel) -> Result<Result<Message, String>> {
    let (from, raw) = (claimed.envelope.from.clone(), claimed.raw.clone());
    match spawn_blocking(move || read::read(&from, &raw)).await {
        Ok(Ok(mail)) => {
            let (to, tokens): (Vec<_>, Vec<_>) = claimed.envelope.to.iter().map(|address| token::split(&chassis.secrets, address)).unzip();
            Ok(Ok(of(channel, mail, to, tokens.into_iter().flatten().next())))
        }
        Ok(Err(error)) => Ok(Err(error.to_string())),
        Err(error) => Err(Error::broken(format!("reading the mail: {error}"))),
    }
}

/// `to`: the envelope's recipients without what stands behind a `+`; `token`: the thread that one of them proves.
pub fn of(channel: &MailChannel, mail: Mail, to: Vec<String>, token: Option<ThreadId>) -> Message {
    let automatic = match mail.automatic {
        Some(Report::Bounce { of, why }) => Some(Automatic::Bounce {
            of: of.iter().filter_map(|id| delivery_of(id)).collect(),
            why: why.unwrap_or_else(|| first_line(&mail.text)),
        }),
        Some(Report::Marked(what)) => Some(Automatic::Marked(format!("automatic mail: {what}"))),
        None if mail.from.as_ref().is_some_and(|from| channel.addresses.contains(from)) => {
            Some(Automatic::Marked("it comes from an address of this channel".to_owned()))
        }
        None => None,
    };
    let domain = mail.from.as_ref().and_then(|from| from.rsplit_once('@')).map(|(_, domain)| domain.to_owned());
    Message {
        parents: mail.parents,
        token,
        groups: domain.into_iter().collect(),
        to,
        calls: true,
        new: quote::new_part(&mail.text).map(str::to_owned),
        text: mail.text,
        attachments: mail.attachments,
        left_out: mail.left_out,
        automatic,
        head: Head {
            message_id: mail.message_id,
            references: mail.references,
            to: mail.reply_to.or(mail.from.clone()).unwrap_or_default(),
            subject: mail.subject,
            ..Head::default()
        },
        author: mail.from,
        ..Message::default()
    }
}

/// Our Message-IDs are `<delivery>.<part>@<domain>`.
fn delivery_of(message_id: &str) -> Option<DeliveryId> {
    message_id.split_once('.')?.0.parse().ok()
}

fn first_line(text: &str) -> String {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason is given").chars().take(200).collect()
}

/// Whether its author is who it says: by the mail server in front when the channel names one, else by ourselves.
pub async fn verdict(
    chassis: &Chassis,
    claimed: &Claimed,
    definition: &ChannelDefinition,
    mail: &MailChannel,
    message: &Message,
) -> Result<Verdict> {
    // Automatic mail is decided without its author.
    let Some(from) = message.author.as_deref().filter(|_| message.automatic.is_none()) else { return Ok(Verdict::NotProven) };
    match &mail.authserv_id {
        Some(id) => Ok(if trust::is_author(&claimed.raw, id, from) { Verdict::Author } else { Verdict::NotProven }),
        // Nobody of a public channel needs to be known, but its users.
        None if definition.access == Access::Public && !definition.users.contains_key(from) => Ok(Verdict::NotProven),
        None => Ok(dmarc::judge(dmarc::resolver(chassis)?, from, &claimed.raw).await),
    }
}
