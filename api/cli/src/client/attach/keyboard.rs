//! The keyboard in raw mode, read by a thread of its own: it may wait for a key for ever and must not keep the process from ending.

use std::{
    io::{self, Read},
    str::FromStr,
};

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use tokio::sync::mpsc;

/// Bytes read at a time, and pieces that wait.
const PIECE: usize = 4096;
const PIECES: usize = 8;

/// The key that leaves, as the byte that it types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u8);

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let lower = text.to_ascii_lowercase();
        match lower.strip_prefix("ctrl-").map(str::as_bytes) {
            Some([key @ (b'a'..=b'z' | b']' | b'\\' | b'^' | b'_')]) => Ok(Self(key.to_ascii_uppercase() & 0x1f)),
            _ => Err("use ctrl- and a letter, or one of ] \\ ^ _".to_owned()),
        }
    }
}

impl Default for Key {
    fn default() -> Self {
        Self(0x1d)
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ctrl-{}", char::from(self.0 | 0x40).to_ascii_lowercase())
    }
}

/// What was typed.
#[derive(Debug, PartialEq, Eq)]
pub enum Typed {
    Bytes(Vec<u8>),
    Detach,
}

pub struct Keyboard {
    before: Option<Termios>,
    typed: mpsc::Receiver<Vec<u8>>,
    detach: u8,
    /// What stood before the detach key in the same piece is typed first.
    leaving: bool,
}

impl Keyboard {
    /// `watch`: only the detach key and the interrupt mean something, and nothing is typed.
    pub fn take(detach: Key, watch: bool) -> io::Result<Self> {
        let stdin = io::stdin();
        let before = match tcgetattr(&stdin) {
            Ok(before) => {
                let mut raw = before.clone();
                raw.make_raw();
                tcsetattr(&stdin, OptionalActions::Now, &raw)?;
                Some(before)
            }
            // No terminal: nothing can be typed.
            Err(_) => None,
        };
        let (sender, typed) = mpsc::channel(PIECES);
        let tty = before.is_some();
        std::thread::spawn(move || {
            let mut buffer = [0; PIECE];
            while tty && let Ok(read @ 1..) = io::stdin().lock().read(&mut buffer) {
                // In raw mode an interrupt is a byte like any other; who only looks on may leave by it.
                let interrupted = watch && buffer[..read].contains(&0x03);
                let bytes = if interrupted { vec![detach.0] } else { buffer[..read].to_vec() };
                if sender.blocking_send(bytes).is_err() {
                    return;
                }
            }
            // Without a keyboard one can still look on; the end of the run ends it.
            if !tty {
                std::thread::park();
            }
        });
        Ok(Self { before, typed, detach: detach.0, leaving: false })
    }

    pub async fn next(&mut self) -> Typed {
        if self.leaving {
            return Typed::Detach;
        }
        let Some(mut bytes) = self.typed.recv().await else { return Typed::Detach };
        match bytes.iter().position(|byte| *byte == self.detach) {
            None => Typed::Bytes(bytes),
            Some(0) => Typed::Detach,
            Some(at) => {
                bytes.truncate(at);
                self.leaving = true;
                Typed::Bytes(bytes)
            }
        }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // Best effort: the terminal may be gone.
            tcsetattr(io::stdin(), OptionalActions::Now, before).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_named_as_people_name_them() {
        assert_eq!("ctrl-]".parse(), Ok(Key(0x1d)));
        assert_eq!("Ctrl-P".parse(), Ok(Key(0x10)));
        assert_eq!("ctrl-\\".parse(), Ok(Key(0x1c)));
        assert!("x".parse::<Key>().is_err() && "ctrl-".parse::<Key>().is_err() && "ctrl-1".parse::<Key>().is_err());
    }
}
