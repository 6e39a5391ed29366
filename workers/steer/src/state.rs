//! The moves of a steer. Reports only go forward; what is over stays.

use towpath_schemas::guest::SteerState;

/// Is nothing more going to happen to it?
pub fn is_over(state: SteerState) -> bool {
    match state {
        SteerState::Queued | SteerState::Sent | SteerState::Written => false,
        SteerState::Read | SteerState::Expired | SteerState::Unknown => true,
    }
}

fn rank(state: SteerState) -> u8 {
    match state {
        SteerState::Queued => 0,
        SteerState::Sent => 1,
        SteerState::Written => 2,
        SteerState::Read | SteerState::Expired | SteerState::Unknown => 3,
    }
}

/// Whether a report about a steer in `from` changes it to `to`.
pub fn moves(from: SteerState, to: SteerState) -> bool {
    !is_over(from) && rank(to) > rank(from)
}

/// What a steer becomes when its sandbox is lost: what was on its way may have been taken and is never sent again.
pub fn at_loss(state: SteerState) -> SteerState {
    match state {
        SteerState::Sent | SteerState::Written => SteerState::Unknown,
        other => other,
    }
}

/// What a steer becomes when its run settles.
pub fn at_settling(state: SteerState) -> SteerState {
    match state {
        SteerState::Queued => SteerState::Expired,
        other => at_loss(other),
    }
}

pub fn word(state: SteerState) -> &'static str {
    match state {
        SteerState::Queued => "queued",
        SteerState::Sent => "sent",
        SteerState::Written => "written",
        SteerState::Read => "read",
        SteerState::Expired => "expired",
        SteerState::Unknown => "unknown",
    }
}

pub const ALL: [SteerState; 6] =
    [SteerState::Queued, SteerState::Sent, SteerState::Written, SteerState::Read, SteerState::Expired, SteerState::Unknown];

pub fn from_word(text: &str) -> Option<SteerState> {
    ALL.into_iter().find(|state| word(*state) == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steer_only_goes_forward_and_ends_once() {
        for from in ALL {
            for to in ALL {
                if moves(from, to) {
                    assert!(!is_over(from) && from != to && !moves(to, from), "{from:?} {to:?}");
                }
            }
            assert!(is_over(at_settling(from)), "{from:?} stays open when its run has ended");
        }
        assert_eq!(at_loss(SteerState::Queued), SteerState::Queued, "what was never sent passes to the next epoch");
        assert_eq!(at_loss(SteerState::Written), SteerState::Unknown);
    }
}
