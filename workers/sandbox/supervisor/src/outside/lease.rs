//! A lease on the command's life, under an agent with a fence: the command may run only until its lease ends, counted from the moment that it was asked for, and whoever wants to start
//! it elsewhere waits for longer than that. So two of them can never run.

use std::{collections::VecDeque, time::Duration};

use towpath_schemas::limit::{LEASE_ASKED_S, LEASES_PER_FENCE};

/// Questions whose answers are still of use.
const ASKED: usize = 8;

#[derive(Debug)]
pub struct Lease {
    fence_us: u64,
    every_us: u64,
    number: u64,
    /// (number, when), in microseconds of [`crate::clock::boot_us`] like all moments here.
    asked: VecDeque<(u64, u64)>,
    /// The connection of the newest question.
    connection: u64,
    until_us: Option<u64>,
}

impl Lease {
    pub fn new(fence_s: u32) -> Self {
        let every = Duration::from_secs(fence_s.into()) / LEASES_PER_FENCE;
        Self {
            fence_us: u64::from(fence_s) * 1_000_000,
            every_us: every.min(Duration::from_secs(LEASE_ASKED_S.into())).as_micros() as u64,
            number: 0,
            asked: VecDeque::new(),
            connection: 0,
            until_us: None,
        }
    }

    fn due_us(&self, connection: u64) -> u64 {
        match self.asked.back() {
            Some((_, asked_us)) if self.connection == connection => asked_us + self.every_us,
            Some(_) | None => 0,
        }
    }

    /// The number of a question that is to be asked now.
    pub fn ask(&mut self, connection: u64, now_us: u64) -> Option<u64> {
        if now_us < self.due_us(connection) || self.has_run_out(now_us) {
            return None;
        }
        self.number += 1;
        self.connection = connection;
        self.asked.push_back((self.number, now_us));
        if self.asked.len() > ASKED {
            self.asked.pop_front();
        }
        Some(self.number)
    }

    /// Until the next question.
    pub fn due_in(&self, connection: u64, now_us: u64) -> Duration {
        Duration::from_micros(self.due_us(connection).saturating_sub(now_us))
    }

    /// The gateway's answer. One that comes when the lease has run out changes nothing: the command is being killed.
    pub fn granted(&mut self, number: u64, now_us: u64) {
        let Some((_, asked_us)) = self.asked.iter().find(|(asked, _)| *asked == number) else { return };
        let until_us = asked_us + self.fence_us;
        if !self.has_run_out(now_us) && now_us < until_us {
            self.until_us = self.until_us.max(Some(until_us));
        }
    }

    /// None: nothing is granted yet.
    pub fn until_us(&self) -> Option<u64> {
        self.until_us
    }

    pub fn has_run_out(&self, now_us: u64) -> bool {
        self.until_us.is_some_and(|until_us| now_us >= until_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000;

    #[test]
    fn it_counts_from_the_question_and_not_from_the_answer() {
        let mut lease = Lease::new(20);
        assert_eq!(lease.ask(1, 100 * S), Some(1));
        lease.granted(1, 108 * S);
        assert_eq!(lease.until_us(), Some(120 * S));
        assert!(!lease.has_run_out(120 * S - 1) && lease.has_run_out(120 * S));
    }

    #[test]
    fn it_is_asked_for_four_times_a_fence_and_at_once_on_a_new_connection() {
        let mut lease = Lease::new(20);
        assert_eq!(lease.ask(1, 0), Some(1));
        assert_eq!(lease.ask(1, 5 * S - 1), None);
        assert_eq!(lease.due_in(1, 2 * S), Duration::from_secs(3));
        assert_eq!(lease.ask(2, 2 * S), Some(2));
        assert_eq!(lease.ask(2, 7 * S), Some(3));
        assert_eq!(Lease::new(86_400).every_us, 60 * S, "and at least every minute");
    }

    #[test]
    fn an_answer_out_of_order_shortens_nothing_and_a_late_one_brings_nothing_back() {
        let mut lease = Lease::new(20);
        lease.ask(1, 0);
        lease.ask(1, 5 * S);
        lease.granted(2, 6 * S);
        lease.granted(1, 7 * S);
        assert_eq!(lease.until_us(), Some(25 * S));
        lease.ask(1, 10 * S);
        lease.granted(3, 26 * S);
        assert!(lease.has_run_out(26 * S));
        assert_eq!(lease.ask(1, 26 * S), None);
    }
}
