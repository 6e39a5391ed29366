//! Every limit that more than one room must agree on (invariant BOUNDED). A limit of a single room lives in that room.

/// Bytes of a run's prompt or an agent's instructions.
pub const PROMPT_BYTES: usize = 1024 * 1024;
/// Bytes of one steer's message.
pub const STEER_BYTES: usize = 32 * 1024;
/// Open steers that one run may hold.
pub const STEERS_OPEN: i64 = 1000;
/// Bytes of a JSON request body; the prompt may be escaped six-fold.
pub const BODY_BYTES: usize = 8 * 1024 * 1024;
/// Bytes of one input or output file unless configured otherwise.
pub const FILE_BYTES: u64 = 25 * 1024 * 1024;
/// Input files of one run, and files that one run may leave in its outputs.
pub const FILES_PER_RUN: usize = 100;
/// Uploads of a tenant that may be open, and parts of one.
pub const UPLOADS_OPEN: i64 = 1000;
pub const UPLOAD_PARTS: i32 = 10_000;
/// Outputs of a session that are restored into an empty workspace.
pub const RESTORED_FILES: usize = 1000;
/// Bytes of a file's name after normalising.
pub const FILE_NAME_BYTES: usize = 255;
/// Bytes of a transcript that are kept of each epoch unless the agent says otherwise, and the least that it may say.
pub const TRANSCRIPT_BYTES: u64 = 10 << 30;
pub const TRANSCRIPT_BYTES_LEAST: u64 = 1 << 20;
/// The shortest and the longest fence, in seconds: a lease that is granted by looks 5 s apart must outlast some of them.
pub const FENCE_LEAST_S: u32 = 15;
pub const FENCE_MOST_S: u32 = 86_400;
/// A supervisor asks for its lease again after this part of the fence, and at the latest after so many seconds.
pub const LEASES_PER_FENCE: u32 = 4;
pub const LEASE_ASKED_S: u32 = 60;
/// Bytes of a result's text; the rest is cut and `truncated` says so.
pub const RESULT_BYTES: usize = 1024 * 1024;
/// Bytes of the last stdout that stand in for a missing result file.
pub const RESULT_TAIL_BYTES: usize = 64 * 1024;
/// Payload bytes of one transcript frame.
pub const FRAME_BYTES: usize = 32 * 1024;
/// Largest terminal, in character cells.
pub const TERMINAL_COLS: u16 = 400;
pub const TERMINAL_ROWS: u16 = 120;
/// Bytes printed on a terminal after which its screen is recorded anew.
pub const SCREEN_EVERY_BYTES: u64 = 256 * 1024;
/// Bytes that may be typed at once, and that may wait for a command that does not read.
pub const TYPED_BYTES: usize = 64 * 1024;
/// How long a viewer of a terminal counts after it was last heard, in seconds; viewers speak every third of it.
pub const VIEWER_S: u64 = 30;
/// How long the supervisor gathers output before it cuts a frame, in milliseconds.
pub const FRAME_MS: u64 = 50;
/// Frames whose subjects end in the same block number: what is sealed is purged block by block, so this many sealed frames of an epoch may stay (1 MiB).
pub const FRAMES_PER_BLOCK: u64 = 32;
/// Bytes of `TASK` and `SYSTEM_PROMPT`; longer ones are only in the `*_FILE` forms (Linux allows 128 KiB an argument).
pub const ENV_VALUE_BYTES: usize = 96 * 1024;
/// Bytes of one message on the connection between supervisor and gateway.
pub const GUEST_MESSAGE_BYTES: usize = 8 * 1024 * 1024;
/// Bytes of one piece of a file on that connection.
pub const FILE_PIECE_BYTES: usize = 256 * 1024;
/// Bytes of a webhook delivery's body (Standard Webhooks advises below 20 KB).
pub const WEBHOOK_BODY_BYTES: usize = 20_000;
/// Targets that one run's result may be delivered to.
pub const TARGETS_PER_RUN: usize = 16;
/// Labels of one run, and bytes of a key or a value.
pub const LABELS_PER_RUN: usize = 32;
pub const LABEL_BYTES: usize = 256;
/// Bytes of a line that a search shows, of the text that is looked for, and lines of one answer.
pub const FOUND_BYTES: usize = 1024;
pub const SEARCH_BYTES: usize = 1024;
pub const FOUND_LINES: usize = 100;
/// Bytes of output that one search looks at before it answers with a cursor.
pub const SEARCHED_BYTES: usize = 64 << 20;
/// Event streams and terminals that one tenant may have open on one process.
pub const STREAMS_PER_TENANT: usize = 10_000;
/// Bytes of one message that comes in, attachments included.
pub const INBOUND_BYTES: usize = 26 * 1024 * 1024;
/// Bytes of one request of Slack's.
pub const SLACK_BYTES: usize = 1024 * 1024;
/// Days that a message is kept as it came; longer than any provider sends it again.
pub const INBOUND_DAYS: i32 = 14;
/// Rules, members, users and addresses of one channel.
pub const CHANNEL_RULES: usize = 1000;
/// Messages of one thread that are taken in an hour unless the channel says otherwise.
pub const MESSAGES_PER_THREAD_HOUR: u32 = 30;
/// Messages of one channel that are taken in a minute unless the channel says otherwise.
pub const MESSAGES_PER_CHANNEL_MINUTE: u32 = 600;
/// Bytes of a result's text in an answer; of a longer one the beginning, and the whole as a file.
pub const ANSWER_TEXT_BYTES: usize = 64 * 1024;
/// Bytes of outputs that go along with one answer; what does not fit is named with its size.
pub const ANSWER_FILE_BYTES: u64 = 10 * 1024 * 1024;
/// Rows of one page of a list.
pub const PAGE_ROWS: i64 = 100;
/// Longest `?wait=` in seconds.
pub const WAIT_S: u64 = 60;
/// Bytes of an `Idempotency-Key`.
pub const IDEMPOTENCY_KEY_BYTES: usize = 255;
/// How long an idempotency key is remembered, in hours.
pub const IDEMPOTENCY_HOURS: i32 = 24;
