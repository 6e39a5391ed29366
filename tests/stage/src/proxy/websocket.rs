//! Follows the messages of one direction of a WebSocket connection, to send some of them twice. Format: RFC 6455, section 5.2; clients and servers of Towpath send no fragments.

/// The longest message that is sent twice; longer ones pass as they come.
const MOST_BYTES: u64 = 16 << 20;
const HEAD_END: &[u8] = b"\r\n\r\n";

#[derive(Default)]
pub(super) struct Messages {
    /// Bytes of the HTTP head's end that came so far; from its whole length on, frames follow.
    head_end: usize,
    /// The frame's header as far as it has come; empty between frames.
    header: Vec<u8>,
    /// Of the frame's payload.
    left: u64,
    /// All of the frame, when it is sent twice.
    copy: Option<Vec<u8>>,
}

impl Messages {
    /// What is to be passed on for `bytes`; with `twice` every text and binary message that begins in them comes again right behind itself.
    pub fn pass(&mut self, bytes: &[u8], twice: bool) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        let mut rest = bytes;
        while let Some((&byte, after)) = rest.split_first() {
            if self.head_end < HEAD_END.len() {
                let next = usize::from(byte == HEAD_END[0]);
                self.head_end = if byte == HEAD_END[self.head_end] { self.head_end + 1 } else { next };
                out.push(byte);
                rest = after;
            } else if self.left == 0 {
                self.header.push(byte);
                out.push(byte);
                rest = after;
                if let Some((length, is_data)) = header(&self.header) {
                    self.left = length;
                    self.copy = (twice && is_data && length <= MOST_BYTES).then(|| self.header.clone());
                    self.header.clear();
                    self.finish(&mut out);
                }
            } else {
                let piece = usize::try_from(self.left).map_or(rest.len(), |left| left.min(rest.len()));
                let (payload, after) = rest.split_at(piece);
                out.extend_from_slice(payload);
                if let Some(copy) = &mut self.copy {
                    copy.extend_from_slice(payload);
                }
                self.left -= piece as u64;
                rest = after;
                self.finish(&mut out);
            }
        }
        out
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if self.left == 0
            && let Some(copy) = self.copy.take()
        {
            out.extend_from_slice(&copy);
        }
    }
}

/// The payload's length, and whether it is a text or a binary message, once the header is whole.
fn header(bytes: &[u8]) -> Option<(u64, bool)> {
    let (first, second) = (*bytes.first()?, *bytes.get(1)?);
    let mask = if second & 0x80 == 0 { 0 } else { 4 };
    let (size, length) = match second & 0x7f {
        126 => (2, u64::from(u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?))),
        127 => (8, u64::from_be_bytes(bytes.get(2..10)?.try_into().ok()?)),
        short => (0, u64::from(short)),
    };
    (bytes.len() == 2 + size + mask).then_some((length, matches!(first & 0x0f, 1 | 2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(opcode: u8, masked: bool, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![0x80 | opcode];
        let mask = if masked { 0x80 } else { 0 };
        match payload.len() {
            short @ 0..126 => frame.push(mask | short as u8),
            middle @ 126..65_536 => {
                frame.push(mask | 126);
                frame.extend_from_slice(&(middle as u16).to_be_bytes());
            }
            long => {
                frame.push(mask | 127);
                frame.extend_from_slice(&(long as u64).to_be_bytes());
            }
        }
        if masked {
            frame.extend_from_slice(&[1, 2, 3, 4]);
        }
        frame.extend_from_slice(payload);
        frame
    }

    #[test]
    fn messages_come_twice_however_they_are_cut_and_pings_once() {
        let head = b"GET /sandbox HTTP/1.1\r\nupgrade: websocket\r\n\r\n".to_vec();
        for masked in [false, true] {
            let messages: Vec<Vec<u8>> = [(1, 0), (1, 5), (2, 200), (9, 3), (2, 70_000), (1, 125)]
                .map(|(opcode, length)| frame(opcode, masked, &vec![opcode; length]))
                .to_vec();
            let sent: Vec<u8> = [head.clone(), messages.concat()].concat();
            let twice: Vec<u8> = messages.iter().flat_map(|message| message.repeat(if message[0] & 0x0f == 9 { 1 } else { 2 })).collect();
            for cut in [1, 2, 3, 7, 1000, sent.len()] {
                let (mut plain, mut doubled) = (Messages::default(), Messages::default());
                let once: Vec<u8> = sent.chunks(cut).flat_map(|piece| plain.pass(piece, false)).collect();
                assert_eq!(once, sent);
                let all: Vec<u8> = sent.chunks(cut).flat_map(|piece| doubled.pass(piece, true)).collect();
                assert_eq!(all, [head.clone(), twice.clone()].concat(), "cut every {cut}");
            }
        }
    }
}
