//! Markdown as Slack's own form (`mrkdwn`, docs.slack.dev "Formatting message text"), in parts that each fit into one message.
//!
//! What an agent writes can neither mention anybody nor make a link that it does not show: `&`, `<` and `>` are escaped in all of its text, and only links
//! of known schemes become links. Characters that Slack would take for marks, where the Markdown meant none, are kept from it by a zero-width space.

use std::mem::take;

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};
use unicode_width::UnicodeWidthStr;

/// Follows a character that must not be taken for a mark.
const NO_MARK: char = '\u{200b}';
const BOLD: u8 = 1;
const STRIKE: u8 = 2;
const ITALIC: u8 = 4;
/// From the outermost to the innermost.
const STYLES: [(u8, char); 3] = [(BOLD, '*'), (STRIKE, '~'), (ITALIC, '_')];
const FENCE: &str = "```";
/// What a mark, or an escaped character at a border, may cost beside the text.
const SPARE: usize = 32;

/// The text in parts of at most `most` UTF-16 units, which must be at least 200. Blocks of code that are divided are fenced in each part (field case B3).
pub fn parts(markdown: &str, most: usize) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = String::new();
    for block in blocks(markdown) {
        let between = if block.tight { "\n" } else { "\n\n" };
        for (n, piece) in block.pieces(most).into_iter().enumerate() {
            let between = if n == 0 { between } else { "\n" };
            if !part.is_empty() && units(&part) + units(between) + units(&piece) > most {
                parts.push(take(&mut part));
            }
            if !part.is_empty() {
                part.push_str(between);
            }
            part.push_str(&piece);
        }
    }
    if !part.is_empty() {
        parts.push(part);
    }
    parts
}

fn units(text: &str) -> usize {
    text.encode_utf16().count()
}

/// Text that stands on lines of its own.
struct Block {
    /// Before its first line, and before every other one.
    prefix: [String; 2],
    content: Content,
    /// No empty line before it.
    tight: bool,
}

enum Content {
    Spans(Vec<Span>),
    /// Untouched.
    Code(String),
}

#[derive(Clone)]
struct Span {
    text: String,
    style: u8,
    kind: SpanKind,
}

#[derive(Clone, PartialEq, Eq)]
enum SpanKind {
    Text,
    Code,
    Link(String),
}

impl Block {
    fn pieces(&self, most: usize) -> Vec<String> {
        match &self.content {
            Content::Code(code) => code_pieces(code, most - 2 * FENCE.len() - 2),
            Content::Spans(spans) => {
                let room = most.saturating_sub(SPARE + self.prefix.iter().map(|prefix| units(prefix)).sum::<usize>());
                divide(spans, room.max(SPARE))
                    .iter()
                    .enumerate()
                    .map(|(n, spans)| {
                        let text = styled(spans, &STYLES, None, None);
                        let mut out = String::new();
                        for (line_n, line) in text.trim_end().split('\n').enumerate() {
                            if line_n > 0 {
                                out.push('\n');
                            }
                            out.push_str(&self.prefix[usize::from(n + line_n > 0)]);
                            out.push_str(line);
                        }
                        out
                    })
                    .collect()
            }
        }
    }
}

fn code_pieces(code: &str, room: usize) -> Vec<String> {
    let fenced = |text: &str| format!("{FENCE}\n{}\n{FENCE}", text.trim_end_matches('\n'));
    // A fence within would end the block.
    let code = escape(&code.replace(FENCE, &format!("``{NO_MARK}`")));
    let mut pieces = Vec::new();
    let mut piece = String::new();
    for line in code.split_inclusive('\n') {
        for line in slices(line, room) {
            if units(&piece) + units(line) > room {
                pieces.push(fenced(&take(&mut piece)));
            }
            piece.push_str(line);
        }
    }
    if !piece.is_empty() || pieces.is_empty() {
        pieces.push(fenced(&piece));
    }
    pieces
}

/// The text in slices of at most `room` units, cut behind a space where there is one, and never within `&amp;`.
fn slices(text: &str, room: usize) -> Vec<&str> {
    let mut slices = Vec::new();
    let mut rest = text;
    while units(rest) > room {
        let mut used = 0;
        let fits = rest
            .char_indices()
            .find(|(_, c)| {
                used += c.len_utf16();
                used > room
            })
            .map_or(rest.len(), |(at, _)| at);
        let head = rest.get(..fits).unwrap_or(rest);
        let border = head.rfind([' ', '\n']).map(|at| at + 1).filter(|at| *at > fits / 2);
        let entity = head.rfind('&').filter(|at| fits - at < "&amp;".len() && !head.get(*at..).is_some_and(|tail| tail.contains(';')));
        let cut = border.or(entity).filter(|cut| *cut > 0).unwrap_or(fits.max(1));
        let Some((slice, tail)) = rest.split_at_checked(cut) else { break };
        slices.push(slice);
        rest = tail;
    }
    if !rest.is_empty() {
        slices.push(rest);
    }
    slices
}

/// Spans in groups, each of which fits. A style goes on in the next group by itself.
fn divide(spans: &[Span], room: usize) -> Vec<Vec<Span>> {
    let mut groups = Vec::new();
    let mut group: Vec<Span> = Vec::new();
    let mut used = 0;
    for span in spans {
        let link = match &span.kind {
            SpanKind::Link(url) => units(&escape(url)) * 3 + 3,
            SpanKind::Text | SpanKind::Code => 0,
        };
        // Marks, one on each side for each style, and room for characters that are kept from being marks.
        let cost = |text: &str| units(&escape(text)) * 11 / 10 + 8;
        let mut span = span.clone();
        let mut link_cost = link;
        if link + cost(&span.text) > room {
            // Too long for a link: shown as text.
            if let SpanKind::Link(url) = &span.kind {
                span.text = format!("{} ({url})", span.text);
                span.kind = SpanKind::Text;
                link_cost = 0;
            }
        }
        if link_cost + cost(&span.text) <= room.saturating_sub(used) {
            used += link_cost + cost(&span.text);
            group.push(span);
            continue;
        }
        let each = (room.saturating_sub(8) / 6).max(1);
        let whole = cost(&span.text) + link_cost <= room;
        // A fifth of the room, for escaping may make five of one.
        for slice in if whole { vec![span.text.as_str()] } else { slices(&span.text, each) } {
            if used > 0 && used + link_cost + cost(slice) > room {
                groups.push(take(&mut group));
                used = 0;
            }
            used += link_cost + cost(slice);
            group.push(Span { text: slice.to_owned(), style: span.style, kind: span.kind.clone() });
        }
    }
    if !group.is_empty() || groups.is_empty() {
        groups.push(group);
    }
    groups
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Spans with the marks of `styles`; `before` and `after` are the characters beside them.
fn styled(spans: &[Span], styles: &[(u8, char)], before: Option<char>, after: Option<char>) -> String {
    let Some(((style, mark), rest)) = styles.split_first() else {
        let mut out = String::new();
        for run in spans.chunk_by(|a, b| a.kind == SpanKind::Text && b.kind == SpanKind::Text) {
            match run {
                [Span { kind: SpanKind::Code, text, .. }] => out.push_str(&format!("`{}`", escape(text))),
                [Span { kind: SpanKind::Link(url), text, .. }] => out.push_str(&link(url, text)),
                texts => out.push_str(&plain(&texts.iter().map(|span| span.text.as_str()).collect::<String>())),
            }
        }
        return out;
    };
    let mut out = String::new();
    let runs: Vec<&[Span]> = spans.chunk_by(|a, b| (a.style & style) == (b.style & style)).collect();
    for (n, run) in runs.iter().enumerate() {
        let before = out.chars().next_back().or(before);
        let after = runs.get(n + 1).and_then(|next| next.first()).and_then(|span| span.text.chars().next()).or(after);
        let inner = styled(run, rest, before, after);
        if run.first().is_none_or(|span| span.style & style == 0) {
            out.push_str(&inner);
            continue;
        }
        // Slack wants a mark beside its word, and nothing of a word on its other side; elsewhere the text goes without.
        let joins = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let lines: Vec<&str> = inner.split('\n').collect();
        for (line_n, line) in lines.iter().enumerate() {
            if line_n > 0 {
                out.push('\n');
            }
            let word = line.trim();
            let (begin, end) = (line.find(word).unwrap_or_default(), line.find(word).unwrap_or_default() + word.len());
            let (lead, tail) = (line.get(..begin).unwrap_or_default(), line.get(end..).unwrap_or_default());
            let joined =
                (lead.is_empty() && line_n == 0 && joins(before)) || (tail.is_empty() && line_n + 1 == lines.len() && joins(after));
            if word.is_empty() || joined {
                out.push_str(line);
            } else {
                out.push_str(&format!("{lead}{mark}{word}{mark}{tail}"));
            }
        }
    }
    out
}

fn link(url: &str, text: &str) -> String {
    let safe = url.replace('|', "%7C").replace('<', "%3C").replace('>', "%3E").replace(char::is_whitespace, "%20").replace('&', "&amp;");
    let label = escape(&text.split_whitespace().collect::<Vec<_>>().join(" ")).replace('|', "¦");
    if label.is_empty() || text == url { format!("<{safe}>") } else { format!("<{safe}|{label}>") }
}

/// Text that has no marks.
fn plain(text: &str) -> String {
    let mut out = String::new();
    for (n, line) in text.split('\n').enumerate() {
        if n > 0 {
            out.push('\n');
        }
        let chars: Vec<char> = line.chars().collect();
        let joins = |at: Option<&char>| at.is_some_and(|c| c.is_alphanumeric());
        for (at, c) in chars.iter().enumerate() {
            // `>` at the beginning of a line would make a quotation of it.
            if at == 0 && *c == '>' {
                out.push(NO_MARK);
            }
            out.push_str(&escape(c.encode_utf8(&mut [0; 4])));
            let opens = "*_~`".contains(*c)
                && !joins(at.checked_sub(1).and_then(|before| chars.get(before)))
                && chars.get(at + 1).is_some_and(|next| !next.is_whitespace());
            let closes = |end: usize| {
                chars.get(end) == Some(c)
                    && !joins(chars.get(end + 1))
                    && end.checked_sub(1).and_then(|before| chars.get(before)).is_some_and(|before| !before.is_whitespace())
            };
            if opens && (at + 2..chars.len()).any(closes) {
                out.push(NO_MARK);
            }
        }
    }
    out
}

#[derive(Default)]
struct Walk {
    blocks: Vec<Block>,
    spans: Vec<Span>,
    style: u8,
    /// Of the lists that are open, the next number; None for one without numbers.
    lists: Vec<Option<u64>>,
    /// What stands before the first line of the item that is open.
    bullet: Option<String>,
    quotes: usize,
    link: Option<String>,
    code: Option<String>,
    table: Option<Vec<Vec<String>>>,
}

fn blocks(markdown: &str) -> Vec<Block> {
    let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH | Options::ENABLE_TASKLISTS;
    let mut walk = Walk::default();
    for event in Parser::new_ext(markdown, options) {
        walk.on(event);
    }
    walk.close();
    walk.blocks
}

impl Walk {
    fn on(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.open(tag),
            Event::End(end) => self.end(end),
            Event::Text(text) => match &mut self.code {
                Some(code) => code.push_str(&text),
                None => self.span(&text, SpanKind::Text),
            },
            // Slack has no way to write this mark within code.
            Event::Code(text) if text.contains('`') => self.span(&text, SpanKind::Text),
            Event::Code(text) | Event::InlineMath(text) | Event::DisplayMath(text) => self.span(&text, SpanKind::Code),
            Event::Html(text) | Event::InlineHtml(text) => self.span(&text, SpanKind::Text),
            Event::FootnoteReference(name) => self.span(&format!("[{name}]"), SpanKind::Text),
            Event::SoftBreak | Event::HardBreak => self.span("\n", SpanKind::Text),
            Event::Rule => {
                self.close();
                self.block(Content::Spans(vec![Span { text: "─".repeat(20), style: 0, kind: SpanKind::Text }]), false);
            }
            Event::TaskListMarker(done) => self.span(if done { "☑ " } else { "☐ " }, SpanKind::Text),
        }
    }

    fn span(&mut self, text: &str, kind: SpanKind) {
        let kind = match &self.link {
            Some(url) => SpanKind::Link(url.clone()),
            None => kind,
        };
        // The parser hands out one text in several pieces.
        if let Some(last) = self.spans.last_mut().filter(|last| last.kind == kind && last.style == self.style && kind != SpanKind::Code) {
            last.text.push_str(text);
            return;
        }
        self.spans.push(Span { text: text.to_owned(), style: self.style, kind });
    }

    fn open(&mut self, tag: Tag<'_>) {
        match tag {
            Tag::Heading { .. } => {
                self.close();
                self.style |= BOLD;
            }
            Tag::Strong => self.style |= BOLD,
            Tag::Emphasis => self.style |= ITALIC,
            Tag::Strikethrough => self.style |= STRIKE,
            Tag::BlockQuote(_) => {
                self.close();
                self.quotes += 1;
            }
            Tag::CodeBlock(kind) => {
                self.close();
                // The language is of no use to Slack.
                let (CodeBlockKind::Fenced(_) | CodeBlockKind::Indented) = kind;
                self.code = Some(String::new());
            }
            Tag::List(first) => {
                self.close();
                self.lists.push(first);
            }
            Tag::Item => {
                self.close();
                self.bullet = Some(match self.lists.last_mut() {
                    Some(Some(number)) => {
                        *number += 1;
                        format!("{}. ", *number - 1)
                    }
                    Some(None) | None => "• ".to_owned(),
                });
            }
            // A picture would be fetched and shown by Slack from wherever the text says.
            Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. } if is_link(&dest_url) => self.link = Some(dest_url.into_string()),
            Tag::Table(_) => {
                self.close();
                self.table = Some(Vec::new());
            }
            Tag::TableHead | Tag::TableRow => {
                if let Some(table) = &mut self.table {
                    table.push(Vec::new());
                }
            }
            Tag::Paragraph => self.close(),
            _ => {}
        }
    }

    fn end(&mut self, end: TagEnd) {
        match end {
            TagEnd::Heading(_) => {
                self.close();
                self.style &= !BOLD;
            }
            TagEnd::Strong => self.style &= !BOLD,
            TagEnd::Emphasis => self.style &= !ITALIC,
            TagEnd::Strikethrough => self.style &= !STRIKE,
            TagEnd::BlockQuote(_) => {
                self.close();
                self.quotes -= 1;
            }
            TagEnd::CodeBlock => {
                if let Some(code) = self.code.take() {
                    self.block(Content::Code(code), false);
                }
            }
            TagEnd::List(_) => {
                self.close();
                self.lists.pop();
            }
            TagEnd::Link | TagEnd::Image => {
                if let Some(url) = self.link.take()
                    && self.spans.last().is_none_or(|last| last.kind != SpanKind::Link(url.clone()))
                {
                    self.spans.push(Span { text: String::new(), style: self.style, kind: SpanKind::Link(url) });
                }
            }
            TagEnd::TableCell => {
                let cell: String = take(&mut self.spans).into_iter().map(|span| span.text).collect();
                if let Some(row) = self.table.as_mut().and_then(|table| table.last_mut()) {
                    row.push(cell.replace('\n', " "));
                }
            }
            TagEnd::Table => {
                if let Some(table) = self.table.take() {
                    self.block(Content::Code(aligned(&table)), false);
                }
            }
            TagEnd::Paragraph | TagEnd::Item => self.close(),
            _ => {}
        }
    }

    /// Ends the block that is open.
    fn close(&mut self) {
        if self.table.is_some() {
            return;
        }
        let spans = take(&mut self.spans);
        if spans.iter().all(|span| span.text.trim().is_empty() && !matches!(span.kind, SpanKind::Link(_))) {
            return;
        }
        let tight = self.bullet.is_some() && self.blocks.last().is_some_and(|last| last.prefix[1].len() > self.quote().len());
        self.block(Content::Spans(spans), tight);
    }

    fn quote(&self) -> &'static str {
        // A quotation within one looks like one.
        if self.quotes > 0 { "> " } else { "" }
    }

    fn block(&mut self, content: Content, tight: bool) {
        let indent = "    ".repeat(self.lists.len().saturating_sub(1));
        let rest = format!("{}{indent}{}", self.quote(), if self.lists.is_empty() { "" } else { "   " });
        let first = match self.bullet.take() {
            Some(bullet) => format!("{}{indent}{bullet}", self.quote()),
            None => rest.clone(),
        };
        self.blocks.push(Block { prefix: [first, rest], content, tight });
    }
}

fn is_link(url: &str) -> bool {
    ["https://", "http://", "mailto:"].iter().any(|scheme| url.get(..scheme.len()).is_some_and(|head| head.eq_ignore_ascii_case(scheme)))
}

fn aligned(table: &[Vec<String>]) -> String {
    let columns = table.iter().map(Vec::len).max().unwrap_or_default();
    let widths: Vec<usize> =
        (0..columns).map(|n| table.iter().filter_map(|row| row.get(n)).map(|cell| cell.width()).max().unwrap_or_default()).collect();
    let mut out = String::new();
    for (n, row) in table.iter().enumerate() {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell}{}", " ".repeat(width.saturating_sub(cell.width())))).collect();
        out.push_str(cells.join(" | ").trim_end());
        out.push('\n');
        if n == 0 {
            out.push_str(&widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>().join("-|-"));
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(markdown: &str) -> String {
        parts(markdown, 4000).join("\n=====\n")
    }

    #[test]
    fn markdown_becomes_slack_s_own_form_and_code_stays_as_it_is_b4() {
        assert_eq!(
            one("# Head\n\n**bold**, *it*, ~~no~~, ***all*** and [text](https://x.org/a?b=1&c)"),
            "*Head*\n\n*bold*, _it_, ~no~, *_all_* and <https://x.org/a?b=1&amp;c|text>"
        );
        assert_eq!(one("`rm -rf *` and `**x**`"), "`rm -rf *` and `**x**`");
        assert_eq!(one("```rust\nlet a = *b & c; // **no** <x>\n```"), "```\nlet a = *b &amp; c; // **no** &lt;x&gt;\n```");
        assert_eq!(one("1. one\n2. two\n   - in\n   - ner\n\ntext"), "1. one\n2. two\n    • in\n    • ner\n\ntext");
        assert_eq!(one("- [x] done\n- [ ] open"), "• ☑ done\n• ☐ open");
        assert_eq!(one("> quoted\n> lines"), "> quoted\n> lines");
        assert_eq!(one("| a | bb |\n|---|---|\n| 1 | **2** |"), "```\na | bb\n--|---\n1 | 2\n```");
        assert_eq!(one("![cat](https://x.org/cat.png)"), "<https://x.org/cat.png|cat>");
    }

    #[test]
    fn nothing_that_an_agent_writes_mentions_anybody_b6() {
        assert_eq!(
            one("<!channel> & <b> <@U012ABC> <https://evil.org|good.org>"),
            "&lt;!channel&gt; &amp; &lt;b&gt; &lt;@U012ABC&gt; &lt;https://evil.org|good.org&gt;"
        );
        assert_eq!(one("[x](!channel) [y](@U012ABC) [z](#C1)"), "x y z");
        assert_eq!(one("[a|b](https://x.org/|c>)"), "<https://x.org/%7Cc%3E|a¦b>");
        assert_eq!(one("`<!here>`"), "`&lt;!here&gt;`");
    }

    #[test]
    fn what_is_no_mark_in_markdown_is_none_in_slack() {
        assert_eq!(one("2 * 3 * 4, snake_case_name"), "2 * 3 * 4, snake_case_name");
        assert_eq!(one(r"\*not bold\*"), "*\u{200b}not bold*");
        assert_eq!(one(r"\> no quote"), "\u{200b}&gt; no quote");
        // Slack has no mark within a word.
        assert_eq!(one("un**believ**able"), "unbelievable");
        assert_eq!(one("**a\nb**"), "*a*\n*b*");
        assert_eq!(one("x** y **z"), "x** y **z");
    }

    #[test]
    fn a_long_text_is_divided_and_fences_are_closed_and_opened_again_b3_b16() {
        let code: String = (0..200).map(|n| format!("line {n} of code & more\n")).collect();
        let text = format!("Before **bold**.\n\n```\n{code}```\n\nAfter.");
        let divided = parts(&text, 1000);
        assert!(divided.len() > 5);
        for part in &divided {
            assert!(units(part) <= 1000, "{}", units(part));
            assert_eq!(part.matches(FENCE).count() % 2, 0, "{part}");
        }
        let lines: Vec<String> =
            divided.iter().flat_map(|part| part.lines()).filter(|line| line.starts_with("line")).map(str::to_owned).collect();
        assert_eq!(lines, code.lines().map(escape).collect::<Vec<_>>());
    }

    #[test]
    fn a_single_paragraph_of_any_length_is_divided_without_breaking_a_style_or_an_entity() {
        let bold = format!("**{}**", "word & ".repeat(2000));
        let emoji = "🦀".repeat(3000);
        let url = format!("[x](https://x.org/{})", "a".repeat(5000));
        for text in [bold, emoji, url, "<".repeat(5000), "x".repeat(10_000)] {
            let divided = parts(&text, 1000);
            for part in &divided {
                assert!(units(part) <= 1000, "{}", units(part));
                assert_eq!(part.matches('*').count() % 2, 0);
                assert_eq!(part.matches('&').count(), part.matches(';').count(), "{part}");
            }
        }
        assert_eq!(parts(&"<".repeat(5000), 1000).concat(), "&lt;".repeat(5000));
    }

    #[test]
    fn an_empty_text_has_no_parts() {
        assert_eq!(parts("\n \n", 1000), [] as [&str; 0]);
    }
}
