//! Everything that is printed: results on stdout, what goes on meanwhile and failures on stderr.

use std::io::{IsTerminal, Write};

use serde::de::DeserializeOwned;
use serde_json::Value;
use towpath_schemas::body::{Page, RunState};

use super::{failure::Failure, terminal::Filter};

#[derive(Debug, Clone, Copy)]
pub struct Printer {
    pub json: bool,
    colors_out: bool,
    colors_err: bool,
}

impl Printer {
    pub fn new(json: bool) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { json, colors_out: wanted && std::io::stdout().is_terminal(), colors_err: wanted && std::io::stderr().is_terminal() }
    }

    /// The API's answer as JSON if that was asked for, otherwise by `show`.
    pub fn answer<T: DeserializeOwned>(&self, answer: Value, show: impl FnOnce(&Self, T) -> String) -> Result<(), Failure> {
        if self.json {
            self.out(&format!("{answer:#}\n"));
            return Ok(());
        }
        let text = show(self, read(answer)?);
        self.out(&text);
        Ok(())
    }

    /// The same for a page of a list; `more` is the command that shows the next one.
    pub fn page<T: DeserializeOwned>(
        &self,
        answer: Value,
        more: Option<&str>,
        show: impl FnOnce(&Self, Vec<T>) -> String,
    ) -> Result<(), Failure> {
        if self.json {
            return self.answer(answer, |_, _: Value| String::new());
        }
        let page: Page<T> = read(answer)?;
        let mut text = show(self, page.items);
        if let (Some(cursor), Some(more)) = (page.cursor, more) {
            text.push_str(&format!("more: {more} --cursor {cursor}\n"));
        }
        self.out(&text);
        Ok(())
    }

    /// One JSON value on one line.
    pub fn line(&self, value: &Value) {
        self.out(&format!("{value}\n"));
    }

    /// To stdout, at once. When nobody reads it any more there is nothing left to do.
    pub fn out(&self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub fn bytes(&self, bytes: &[u8]) {
        let mut stdout = std::io::stdout().lock();
        if stdout.write_all(bytes).and_then(|()| stdout.flush()).is_err() {
            std::process::exit(0);
        }
    }

    /// To stderr: what goes on meanwhile.
    pub fn note(&self, text: &str) {
        eprintln!("{}", paint(self.colors_err, "2", text));
    }

    pub fn failure(&self, failure: &Failure) {
        let name = paint(self.colors_err, "1;31", "towpath:");
        match failure {
            Failure::Use(text) | Failure::Unreachable(text) => eprintln!("{name} {text}"),
            Failure::Refused(problem) => {
                let blocked = problem.blocked_by.as_ref().map(|what| format!(" ({what})")).unwrap_or_default();
                eprintln!("{name} {}{blocked}\n{} [{}]", problem.detail, problem.help, problem.code);
                if self.json {
                    self.out(&format!("{:#}\n", serde_json::to_value(problem).unwrap_or_default()));
                }
            }
            Failure::Ended(_) | Failure::Interrupted | Failure::Unwell => {}
        }
    }

    /// A filter for what agents printed, with colours where they can be seen.
    pub fn filter(&self) -> Filter {
        Filter::new(self.colors_out)
    }

    pub fn bold(&self, text: &str) -> String {
        paint(self.colors_out, "1", text)
    }

    pub fn state(&self, state: RunState) -> String {
        paint(self.colors_out, state_color(state), state.word())
    }

    /// Rows under a head, in columns; colours do not count.
    pub fn table(&self, head: &[&str], rows: Vec<Vec<String>>) -> String {
        let mut all = vec![head.iter().map(|title| title.to_uppercase()).collect::<Vec<_>>()];
        all.extend(rows);
        let width = |column: usize| all.iter().filter_map(|row| row.get(column)).map(|cell| visible(cell)).max().unwrap_or(0);
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let mut text = String::new();
        for row in &all {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell}{}", " ".repeat(width - visible(cell))));
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// An answer's value as one of our bodies.
pub fn read<T: DeserializeOwned>(answer: Value) -> Result<T, Failure> {
    serde_json::from_value(answer).map_err(|error| Failure::Unreachable(format!("the answer is not what this release expects: {error}")))
}

/// A time as people read it.
pub fn time(at: impl std::fmt::Display) -> String {
    at.to_string().chars().take(19).collect()
}

fn state_color(state: RunState) -> &'static str {
    match state {
        RunState::Queued | RunState::Starting => "33",
        RunState::Running => "36",
        RunState::Stopping | RunState::Finishing => "35",
        RunState::Succeeded => "32",
        RunState::Failed | RunState::TimedOut => "31",
        RunState::Canceled => "2",
    }
}

fn paint(colors: bool, code: &str, text: &str) -> String {
    if colors { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Characters that take room.
fn visible(cell: &str) -> usize {
    Filter::new(false).pass(cell.as_bytes()).chars().count()
}
