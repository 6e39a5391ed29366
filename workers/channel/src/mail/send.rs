//! One attempt to answer by mail. `unknown` is resolved by `same_id`: the mail is sent again under the same Message-ID, and a receiver who sees both tells by it
//! that they are one.

use std::collections::BTreeMap;

use lettre::address::Envelope;
use towpath_chassis::{Chassis, Result};
use towpath_delivery::{Due, state::Answer};
use towpath_schemas::{channel::MailChannel, limit::ANSWER_TEXT_BYTES};

use super::{
    compose::{self, compose},
    smtp,
};
use crate::{
    circuit::Attempt,
    intake::table::{self, Answering},
    message::Said,
    token,
};

pub(crate) async fn attempt(
    chassis: &Chassis,
    due: &Due,
    answering: &Answering,
    mail: &MailChannel,
    secrets: &BTreeMap<String, String>,
    said: Said,
) -> Result<Attempt> {
    let refused = |why: String| Ok(Attempt::of(Answer::Refused(why)));
    let Some((from, domain)) = mail.addresses.first().and_then(|from| Some((from, from.rsplit_once('@')?.1))) else {
        return refused("the channel has no address".to_owned());
    };
    let message_id = format!("{}.1@{domain}", due.id);
    let said = said.fit(ANSWER_TEXT_BYTES);
    let answer = compose::Answer {
        from: from.clone(),
        name: answering.agent.clone(),
        reply_to: answering.thread.map_or_else(|| from.clone(), |thread| token::address(&chassis.secrets, from, thread)),
        to: answering.head.to.clone(),
        subject: answering.head.subject.clone(),
        message_id: message_id.clone(),
        in_reply_to: answering.head.message_id.clone(),
        references: answering.head.references.clone(),
        text: format!("{}\n\n---\n\n{}", said.text, said.footer),
        attachments: said.attachments,
    };
    let composed = match compose(&answer) {
        Ok(composed) => composed,
        Err(error) => return refused(error.to_string()),
    };
    // A bounce comes back to the channel's own address; its report carries the Message-ID.
    let Ok(envelope) = envelope(from, &answer.to) else { return refused(format!("`{}` is no mail address", answer.to)) };
    if let Some(thread) = answering.thread {
        // Known before anyone can answer it.
        let mut work = chassis.begin().await?;
        table::insert_message(&mut work, answering.channel, &message_id, thread, due.tenant).await?;
        work.commit().await?;
    }
    let password = secrets.get("smtp_password").map(String::as_str);
    Ok(smtp::send(chassis, &mail.smtp, password, domain, &envelope, &composed.formatted()).await)
}

fn envelope(from: &str, to: &str) -> std::result::Result<Envelope, lettre::error::Error> {
    let address = |text: &str| text.parse().map_err(|_| lettre::error::Error::MissingTo);
    Envelope::new(Some(address(from)?), vec![address(to)?])
}
