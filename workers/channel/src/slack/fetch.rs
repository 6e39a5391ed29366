//! The files of a message, which Slack keeps until somebody asks for them.

use towpath_chassis::{Chassis, Result};
use towpath_schemas::{channel::SlackChannel, limit::INBOUND_BYTES};

use super::web::{Trouble, Web};
use crate::message::{Attachment, Message};

/// Files of one message; the others are named as left out.
const FILES: usize = 100;

/// The message with its files. One that cannot be had is named as left out. Err(why) while Slack does not answer, unless this is the `last` time that anybody asks.
pub(crate) async fn fetch(
    chassis: &Chassis,
    slack: &SlackChannel,
    token: &str,
    message: &Message,
    last: bool,
) -> Result<std::result::Result<Message, String>> {
    let web = Web::new(chassis, &slack.api, token)?;
    let mut whole = message.clone();
    let mut room = INBOUND_BYTES;
    for (n, file) in whole.remote.drain(..).enumerate() {
        if n >= FILES {
            whole.left_out.push(format!("{}: a message brings at most {FILES} files", file.name));
            continue;
        }
        if usize::try_from(file.size).map_or(true, |size| size > room) {
            whole
                .left_out
                .push(format!("{}: {} bytes are more than the rest of the {INBOUND_BYTES} that a message may bring", file.name, file.size));
            continue;
        }
        match web.download(&file.url, room).await {
            Ok(content) => {
                room -= content.len();
                whole.attachments.push(Attachment { name: file.name, media_type: file.media_type, content });
            }
            Err(Trouble::Ours(error)) => return Err(error),
            Err(Trouble::Gone(why)) => whole.left_out.push(format!("{}: {why}", file.name)),
            Err(trouble) if last => whole.left_out.push(format!("{}: {}", file.name, trouble.why())),
            Err(trouble) => return Ok(Err(format!("{}: {}", file.name, trouble.why()))),
        }
    }
    Ok(Ok(whole))
}
