//! Everything that is printed: results on stdout, what goes on meanwhile and failures on stderr.

use std::io::{IsTerminal, Write};

use serde::de::DeserializeOwned;
use serde_json::Value;
use towpath_schemas::body::{Page, RunState};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::{failure::Failure, terminal::Filter};

#[derive(Debug, Clone, Copy)]
pub struct Printer {
    pub json: bool,
    colors_out: bool,
    colors_err: bool,
    err_is_terminal: bool,
}

impl Printer {
    pub fn new(json: bool) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let err_is_terminal = std::io::stderr().is_terminal();
        Self { json, colors_out: wanted && std::io::stdout().is_terminal(), colors_err: wanted && err_is_terminal, err_is_terminal }
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
        eprintln!("{}{}", self.clear(), paint(self.colors_err, "2", text));
    }

    /// Somebody sees at once what goes to stderr.
    pub fn is_watched(&self) -> bool {
        self.err_is_terminal && !self.json
    }

    /// To a terminal only: a line that the next one takes the place of.
    pub fn passing(&self, text: &str) {
        if self.is_watched() {
            eprint!("{}{}", self.clear(), paint(self.colors_err, "2", text));
        }
    }

    /// Takes a passing line away.
    fn clear(&self) -> &'static str {
        if self.is_watched() { "\r\x1b[K" } else { "" }
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

    /// Rows under a head, in columns that fit the terminal; colours do not count.
    pub fn table(&self, head: &[&str], rows: Vec<Vec<String>>) -> String {
        let room = rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| usize::from(size.ws_col)).filter(|room| *room > 0);
        table(head, rows, room)
    }
}

/// Least width that a column is cut to.
const CUT_TO: usize = 8;

/// Columns beside one another, in `room` characters if there is a limit. Ids and coloured words stay whole: the one to be copied, the other short.
fn table(head: &[&str], rows: Vec<Vec<String>>, room: Option<usize>) -> String {
    let mut all = vec![head.iter().map(|title| title.to_uppercase()).collect::<Vec<_>>()];
    all.extend(rows);
    let column = |number: usize| all.iter().filter_map(move |row| row.get(number));
    let mut widths: Vec<usize> = (0..head.len()).map(|number| column(number).map(|cell| visible(cell)).max().unwrap_or(0)).collect();
    let may_be_cut: Vec<bool> = (0..head.len()).map(|number| column(number).all(|cell| !is_id(cell) && !cell.contains('\x1b'))).collect();
    let between = 2 * head.len().saturating_sub(1);
    while room.is_some_and(|room| widths.iter().sum::<usize>() + between > room) {
        let widest = (0..head.len()).filter(|number| may_be_cut[*number] && widths[*number] > CUT_TO).max_by_key(|number| widths[*number]);
        let Some(widest) = widest else { break };
        widths[widest] -= 1;
    }
    let mut text = String::new();
    for row in &all {
        let cells = row.iter().zip(&widths).map(|(cell, width)| {
            let cell = cut(cell, *width);
            let blank = width.saturating_sub(visible(&cell));
            format!("{cell}{}", " ".repeat(blank))
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn is_id(cell: &str) -> bool {
    cell.split_once('_')
        .is_some_and(|(prefix, digits)| prefix.len() == 3 && digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The cell, or as much of it as fits before an ellipsis.
fn cut(cell: &str, width: usize) -> String {
    if visible(cell) <= width {
        return cell.to_owned();
    }
    let mut kept = String::new();
    let mut used = 0;
    for character in cell.chars() {
        used += character.width().unwrap_or(0);
        if used + 1 > width {
            break;
        }
        kept.push(character);
    }
    kept + "…"
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

/// The room that a cell takes on a terminal.
fn visible(cell: &str) -> usize {
    Filter::new(false).pass(cell.as_bytes()).width()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_the_terminal_and_ids_stay_whole() {
        let id = format!("run_{}", "0".repeat(32));
        let rows = vec![
            vec![id.clone(), "\x1b[32msucceeded\x1b[0m".to_owned(), "http://127.0.0.1:38137/a/very/long/path".to_owned()],
            vec![id.clone(), "failed".to_owned(), "漢字漢字漢字漢字漢字漢字".to_owned()],
        ];
        let head = ["run", "state", "target"];
        let whole = table(&head, rows.clone(), None);
        assert!(whole.contains("/a/very/long/path") && whole.contains("漢字漢字漢字漢字漢字漢字"), "{whole}");
        let fitted = table(&head, rows.clone(), Some(64));
        assert!(fitted.lines().all(|line| visible(line) <= 64), "{fitted}");
        assert!(
            fitted.matches(&id).count() == 2
                && fitted.contains("succeeded")
                && fitted.contains("http://127.0.0…")
                && fitted.contains("漢字漢字漢字漢…"),
            "{fitted}"
        );
        // Too narrow for the id: what there is stays readable.
        assert!(table(&head, rows, Some(10)).contains(&id));
    }
}
