//! A row of the screen as control sequences for somebody's own terminal. Nothing else than text, colours and styles ever comes out.

use std::fmt::Write;

use avt::{Color, Line, Pen};

/// The row's cells from `from` on, at most `cols` of them, the rest of the line cleared. Begins and ends with default style; does not move the cursor first.
pub fn paint(line: &Line, from: usize, cols: usize) -> String {
    let mut out = String::from("\x1b[0m");
    let mut pen: Option<Pen> = None;
    let mut painted = 0;
    for cell in line.cells().iter().skip(from) {
        let width = usize::from(cell.width());
        // The second half of a wide character is painted with its first.
        if width == 0 {
            continue;
        }
        if painted + width > cols {
            break;
        }
        if pen.as_ref() != Some(cell.pen()) {
            out.push_str(&style(cell.pen()));
            pen = Some(*cell.pen());
        }
        let character = cell.char();
        out.push(if character.is_control() { ' ' } else { character });
        painted += width;
    }
    out.push_str("\x1b[0m");
    if painted < cols {
        out.push_str("\x1b[K");
    }
    out
}

fn style(pen: &Pen) -> String {
    let mut codes = String::from("\x1b[0");
    let styles = [
        (pen.is_bold(), 1),
        (pen.is_faint(), 2),
        (pen.is_italic(), 3),
        (pen.is_underline(), 4),
        (pen.is_blink(), 5),
        (pen.is_inverse(), 7),
        (pen.is_strikethrough(), 9),
    ];
    for (_, code) in styles.iter().filter(|(on, _)| *on) {
        // Writing to a string cannot fail.
        let _ = write!(codes, ";{code}");
    }
    for (color, base) in [(pen.foreground(), 30), (pen.background(), 40)] {
        let _ = match color {
            None => Ok(()),
            Some(Color::Indexed(index @ 0..=7)) => write!(codes, ";{}", base + u16::from(index)),
            Some(Color::Indexed(index @ 8..=15)) => write!(codes, ";{}", base + 52 + u16::from(index)),
            Some(Color::Indexed(index)) => write!(codes, ";{};5;{index}", base + 8),
            Some(Color::RGB(rgb)) => write!(codes, ";{};2;{};{};{}", base + 8, rgb.r, rgb.g, rgb.b),
        };
    }
    codes.push('m');
    codes
}

#[cfg(test)]
mod tests {
    use towpath_schemas::frame::Size;

    use crate::Screen;

    #[test]
    fn what_is_painted_shows_the_same_and_commands_nothing() {
        let size = Size { cols: 30, rows: 4 };
        let mut screen = Screen::new(size);
        screen.print(
            "\x1b[1;4;31mred\x1b[0m\x1b[48;2;1;2;3mrgb\x1b[0;92mgreen\x1b[38;5;200mpink\x1b[0m 🦀x\r\n\x1b]52;c;aGk=\x07two".as_bytes(),
        );
        let mut copy = Screen::new(size);
        for (row, line) in screen.terminal().screen().visible_lines().enumerate() {
            let painted = super::paint(line, 0, 30);
            assert!(!painted.contains("]52"), "{painted:?}");
            copy.print(format!("\x1b[{};1H{painted}", row + 1).as_bytes());
        }
        for (one, other) in screen.terminal().screen().visible_lines().zip(copy.terminal().screen().visible_lines()) {
            assert_eq!(one.cells(), other.cells());
        }
        let first = screen.terminal().screen().line(0).expect("row");
        assert_eq!(super::paint(first, 3, 3), "\x1b[0m\x1b[0;48;2;1;2;3mrgb\x1b[0m");
    }
}
