//! What an attempt makes of a delivery. Pure.

use std::time::Duration;

use towpath_chassis::clock;

use crate::table::TargetKind;

/// Waits after the first, second, … failed attempt (Standard Webhooks, "Retries": 5 s to 24 h, 75 h 35 min 5 s in all).
pub const WAITS: [Duration; 9] = [
    Duration::from_secs(5),
    Duration::from_secs(5 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(2 * 3600),
    Duration::from_secs(5 * 3600),
    Duration::from_secs(10 * 3600),
    Duration::from_secs(14 * 3600),
    Duration::from_secs(20 * 3600),
    Duration::from_secs(24 * 3600),
];
/// The waits of an answer to a thread, where somebody looks for it: 5 s to 8 h, 24 h 11 min in all.
pub const THREAD_WAITS: [Duration; 11] = [
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(15 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(3600),
    Duration::from_secs(2 * 3600),
    Duration::from_secs(4 * 3600),
    Duration::from_secs(8 * 3600),
    Duration::from_secs(8 * 3600 + 20 * 60),
];
/// How long a delivery waits, from when it was owed, for a way to its receiver that is closed.
pub const HELD_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// A receiver may ask for a longer wait than the schedule's, up to this.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// What an attempt met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The receiver answered with this status.
    Status { status: u16, retry_after: Option<Duration> },
    /// It was surely not received: no connection, no address.
    NotSent(String),
    /// It may have been received: no answer came.
    NoAnswer(String),
    /// The receiver took it.
    Taken(String),
    /// The receiver will not take it now, says so, and perhaps when to come again.
    NotTaken { why: String, retry_after: Option<Duration> },
    /// It was not even tried: the way to the receiver is closed for so long, for all that goes there.
    Held { after: Duration, why: String },
    /// It may never be sent: an address that is refused, a secret that does not open.
    Refused(String),
}

/// What becomes of the delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    Delivered,
    /// Try again after the wait; `unknown` tells that the last attempt may have arrived.
    Again {
        after: Duration,
        unknown: bool,
    },
    /// It was no attempt; look again after the wait.
    Held {
        after: Duration,
    },
    Dead,
}

/// What there was of a delivery until now.
#[derive(Debug, Clone, Copy)]
pub struct Tried {
    pub kind: TargetKind,
    /// With the one that just ended.
    pub attempts: i32,
    /// Since it was owed.
    pub age: Duration,
}

pub fn next(tried: Tried, answer: &Answer) -> Next {
    let (unknown, asked) = match answer {
        Answer::Status { status: 200..=299, .. } | Answer::Taken(_) => return Next::Delivered,
        // The receiver is gone and says so.
        Answer::Status { status: 410, .. } | Answer::Refused(_) => return Next::Dead,
        Answer::Status { retry_after, .. } => (false, *retry_after),
        Answer::NotSent(_) => (false, None),
        Answer::NotTaken { retry_after, .. } => (false, *retry_after),
        Answer::NoAnswer(_) => (true, None),
        Answer::Held { .. } if tried.age >= clock::scaled(HELD_MAX) => return Next::Dead,
        Answer::Held { after, .. } => return Next::Held { after: *after },
    };
    let waits: &[Duration] = match tried.kind {
        TargetKind::Webhook => &WAITS,
        TargetKind::Thread => &THREAD_WAITS,
    };
    match usize::try_from(tried.attempts - 1).ok().and_then(|done| waits.get(done)).map(|wait| clock::scaled(*wait)) {
        Some(wait) => Next::Again { after: asked.map_or(wait, |asked| asked.min(RETRY_AFTER_MAX).max(wait)), unknown },
        None => Next::Dead,
    }
}

/// The answer in words, for the owner.
pub fn words(answer: &Answer) -> String {
    match answer {
        Answer::Status { status: 410, .. } => "HTTP 410: the receiver is gone".to_owned(),
        Answer::Status { status: status @ 300..=399, .. } => format!("HTTP {status}: redirects are not followed"),
        Answer::Status { status, .. } => format!("HTTP {status}"),
        Answer::NotSent(why) => format!("not sent: {why}"),
        Answer::Taken(words) | Answer::NotTaken { why: words, .. } => words.clone(),
        Answer::Held { why, .. } => format!("held back: {why}"),
        Answer::NoAnswer(why) => format!("no answer: {why}"),
        Answer::Refused(why) => format!("refused: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(status: u16) -> Answer {
        Answer::Status { status, retry_after: None }
    }

    fn tried(attempts: i32) -> Tried {
        Tried { kind: TargetKind::Webhook, attempts, age: Duration::ZERO }
    }

    #[test]
    fn a_delivery_is_tried_by_the_schedule_of_its_kind_and_then_given_up() {
        for (kind, waits) in [(TargetKind::Webhook, &WAITS[..]), (TargetKind::Thread, &THREAD_WAITS[..])] {
            let last = i32::try_from(waits.len()).expect("few") + 1;
            let nexts: Vec<Next> = (1..=last).map(|attempts| next(Tried { kind, ..tried(attempts) }, &status(500))).collect();
            let expected: Vec<Next> = waits.iter().map(|wait| Next::Again { after: *wait, unknown: false }).chain([Next::Dead]).collect();
            assert_eq!(nexts, expected);
        }
        assert_eq!(WAITS.iter().sum::<Duration>(), Duration::from_secs(75 * 3600 + 35 * 60 + 5));
        assert_eq!(THREAD_WAITS.iter().sum::<Duration>(), Duration::from_secs(24 * 3600 + 11 * 60 + 20));
    }

    #[test]
    fn gone_stops_at_once_and_a_redirect_is_a_failure() {
        assert_eq!(next(tried(1), &status(410)), Next::Dead);
        assert_eq!(next(tried(1), &status(302)), Next::Again { after: WAITS[0], unknown: false });
        assert_eq!(next(tried(1), &status(204)), Next::Delivered);
    }

    #[test]
    fn a_missing_answer_is_unknown_and_not_a_failure() {
        assert_eq!(next(tried(1), &Answer::NoAnswer("timed out".into())), Next::Again { after: WAITS[0], unknown: true });
    }

    #[test]
    fn what_is_held_back_waits_without_counting_but_not_for_ever() {
        let held = Answer::Held { after: Duration::from_secs(60), why: "the token was revoked".to_owned() };
        assert_eq!(next(tried(99), &held), Next::Held { after: Duration::from_secs(60) });
        assert_eq!(next(Tried { age: HELD_MAX, ..tried(1) }, &held), Next::Dead);
    }

    #[test]
    fn a_longer_retry_after_is_honoured_within_a_bound() {
        let asked = |seconds| next(tried(1), &Answer::Status { status: 429, retry_after: Some(Duration::from_secs(seconds)) });
        assert_eq!(asked(1), Next::Again { after: WAITS[0], unknown: false });
        assert_eq!(asked(600), Next::Again { after: Duration::from_secs(600), unknown: false });
        assert_eq!(asked(u64::MAX), Next::Again { after: RETRY_AFTER_MAX, unknown: false });
    }
}
