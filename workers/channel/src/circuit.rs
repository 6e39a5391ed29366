//! A way out that is out of order: the provider is away, or our account with it was taken. Nobody asks it over and over, what is owed waits without an attempt
//! being counted, one delivery at a time tries whether it works again, and the owner is told of what does not mend by itself.

use std::time::Duration;

use towpath_chassis::{Chassis, Result, clock};
use towpath_delivery::{About, state::Answer};
use towpath_schemas::id::InboundId;

use crate::{intake::table::Answering, notice, table};

/// From one try to the next: as long as it has been out of order, within these.
pub const SHORTEST: Duration = Duration::from_secs(5);
pub const LONGEST: Duration = Duration::from_secs(300);

/// What came of one attempt to answer.
#[derive(Debug)]
pub struct Attempt {
    pub answer: Answer,
    /// It would not have gone otherwise with any other answer of this channel.
    pub broken: Option<Broken>,
}

/// Why nothing goes out.
#[derive(Debug)]
pub struct Broken {
    pub why: String,
    /// It will not mend unless somebody does something.
    pub lasting: bool,
}

impl Attempt {
    pub fn of(answer: Answer) -> Self {
        Self { answer, broken: None }
    }

    /// Nothing was sent.
    pub fn broken(why: String, lasting: bool) -> Self {
        Self { answer: Answer::Held { after: SHORTEST, why: why.clone() }, broken: Some(Broken { why, lasting }) }
    }
}

/// Some(why not) while the way is closed, but for the one whose turn it is to try.
pub async fn gate(chassis: &Chassis, answering: &Answering) -> Result<Option<Answer>> {
    let Some(why) = &answering.broken else { return Ok(None) };
    let wait = table::probe(&chassis.db, answering.channel).await?;
    Ok(wait.map(|after| Answer::Held { after, why: why.clone() }))
}

/// Closes or opens the way by what an attempt met.
pub async fn settle(chassis: &Chassis, answering: &Answering, message: InboundId, attempt: Attempt) -> Result<Answer> {
    match attempt.broken {
        Some(broken) => {
            let mut work = chassis.begin().await?;
            let fresh = table::trip(&mut work, answering.channel, &broken.why, clock::scaled(SHORTEST)).await?;
            if fresh {
                tracing::warn!(channel = answering.definition.name, why = broken.why, "a channel is out of order");
                if broken.lasting
                    && let Some(owner) = table::owner_of(&mut work, message).await?
                {
                    let what =
                        format!("nothing can be sent: {}. Answers wait, at most seven days, and go out once it works again.", broken.why);
                    notice::to_owner(chassis, &mut work, &owner, message, About::ChannelBroken, None, &what).await?;
                }
            }
            work.commit().await?;
        }
        None => {
            // Held for another reason than the way itself tells nothing of the way.
            if answering.broken.is_some() && !matches!(attempt.answer, Answer::NoAnswer(_) | Answer::Held { .. }) {
                table::mend(&chassis.db, answering.channel).await?;
            }
        }
    }
    Ok(attempt.answer)
}
