//! Another `ETag` in an HTTP/1.1 answer (RFC 9110, section 8.8.3).

const HEAD_END: &[u8] = b"\r\n\r\n";

/// The piece with this text for its `ETag`, or without one when the text is empty. None when it does not begin with an answer's whole head that has one:
/// answers come one after the other, each from the beginning of a piece.
pub(super) fn changed(piece: &[u8], text: &str) -> Option<Vec<u8>> {
    if !piece.starts_with(b"HTTP/1.1 ") {
        return None;
    }
    let end = piece.windows(HEAD_END.len()).position(|window| window == HEAD_END)?;
    let head = std::str::from_utf8(&piece[..end]).ok()?;
    let is_etag = |line: &&str| line.split_once(':').is_some_and(|(name, _)| name.eq_ignore_ascii_case("etag"));
    head.split("\r\n").find(is_etag)?;
    let kept = head.split("\r\n").filter(|line| !is_etag(line)).map(str::to_owned);
    let lines: Vec<String> = kept.chain((!text.is_empty()).then(|| format!("ETag: {text}"))).collect();
    Some([lines.join("\r\n").as_bytes(), &piece[end..]].concat())
}

#[cfg(test)]
mod tests {
    use super::changed;

    #[test]
    fn the_etag_of_an_answer_is_another_one_and_all_else_is_kept() {
        let answer = b"HTTP/1.1 200 OK\r\nEtag: \"1\"\r\nContent-Length: 8\r\n\r\nETag: \"1\"";
        let expected: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nETag: abc-3\r\n\r\nETag: \"1\"";
        assert_eq!(changed(answer, "abc-3").as_deref(), Some(expected));
        let expected: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nETag: \"1\"";
        assert_eq!(changed(answer, "").as_deref(), Some(expected));
    }

    #[test]
    fn what_is_no_head_with_an_etag_passes_as_it_is() {
        for piece in [&b"HTTP/1.1 204 No Content\r\n\r\n"[..], b"ETag: \"1\"\r\n\r\n", b"HTTP/1.1 200 OK\r\nETag: \"1\"\r\n"] {
            assert_eq!(changed(piece, "abc"), None);
        }
    }
}
