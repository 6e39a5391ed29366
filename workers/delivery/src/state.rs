//! What an attempt makes of a delivery. Pure.

use std::time::Duration;

use towpath_chassis::clock;

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
    /// The receiver will not take it now, and says so.
    NotTaken(String),
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
    Dead,
}

/// `attempts` counts the one that just ended.
pub fn next(attempts: i32, answer: &Answer) -> Next {
    let (unknown, asked) = match answer {
        Answer::Status { status: 200..=299, .. } | Answer::Taken(_) => return Next::Delivered,
        // The receiver is gone and says so.
        Answer::Status { status: 410, .. } | Answer::Refused(_) => return Next::Dead,
        Answer::Status { retry_after, .. } => (false, *retry_after),
        Answer::NotSent(_) | Answer::NotTaken(_) => (false, None),
        Answer::NoAnswer(_) => (true, None),
    };
    match usize::try_from(attempts - 1).ok().and_then(|done| WAITS.get(done)).map(|wait| clock::scaled(*wait)) {
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
        Answer::Taken(words) | Answer::NotTaken(words) => words.clone(),
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

    #[test]
    fn a_delivery_is_tried_by_the_schedule_and_then_given_up() {
        let waits: Vec<Next> = (1..=10).map(|attempts| next(attempts, &status(500))).collect();
        let expected: Vec<Next> = WAITS.iter().map(|wait| Next::Again { after: *wait, unknown: false }).chain([Next::Dead]).collect();
        assert_eq!(waits, expected);
        assert_eq!(WAITS.iter().sum::<Duration>(), Duration::from_secs(75 * 3600 + 35 * 60 + 5));
    }

    #[test]
    fn gone_stops_at_once_and_a_redirect_is_a_failure() {
        assert_eq!(next(1, &status(410)), Next::Dead);
        assert_eq!(next(1, &status(302)), Next::Again { after: WAITS[0], unknown: false });
        assert_eq!(next(1, &status(204)), Next::Delivered);
    }

    #[test]
    fn a_missing_answer_is_unknown_and_not_a_failure() {
        assert_eq!(next(1, &Answer::NoAnswer("timed out".into())), Next::Again { after: WAITS[0], unknown: true });
    }

    #[test]
    fn a_longer_retry_after_is_honoured_within_a_bound() {
        let asked = |seconds| next(1, &Answer::Status { status: 429, retry_after: Some(Duration::from_secs(seconds)) });
        assert_eq!(asked(1), Next::Again { after: WAITS[0], unknown: false });
        assert_eq!(asked(600), Next::Again { after: Duration::from_secs(600), unknown: false });
        assert_eq!(asked(u64::MAX), Next::Again { after: RETRY_AFTER_MAX, unknown: false });
    }
}
