//! What can be observed of a world, as text without ids and times: two performances that differ only in their accidents have the same.

use anyhow::{Context, Result};
use towpath_schemas::id::TenantId;
use towpath_transcript::reader::{self, Cursor, Piece};

use crate::{World, life::CHANNEL};

/// One part: its name, and a query that gives one line of text for each row. Ids stand as whether they are there.
const PARTS: [(&str, &str); 21] = [
    ("run", "select concat_ws(' ', prompt, state, 'wanted', wanted, 'reason', reason, 'waits', waiting_for, 'epoch', epoch, active, incarnation, starts, restarts,
        exited, exit_code, exit_signal, message, started_at is not null, ended_at is not null) from run order by created_at, id"),
    ("history", "select concat_ws(' ', from_state, to_state, cause, case when actor like 'prn%' then 'person' else actor end, epoch, reason, detail - 'steer')
        from run_history order by run_id, revision"),
    ("step", "select concat_ws(' ', epoch, step, detail) from run_step order by epoch, step"),
    ("result", "select concat_ws(' ', epoch, text, truncated) from run_result"),
    ("slot", "select concat_ws(' ', epoch, pool) from slot order by epoch"),
    ("workspace", "select concat_ws(' ', pool, epoch, run_id is not null) from workspace"),
    ("steer", "select concat_ws(' ', ordinal, message, state, reason, epoch) from steer order by ordinal"),
    ("sandbox", "select concat_ws(' ', epoch, state, unwanted, incarnation, identity is not null, observed, refusal) from sandbox order by epoch"),
    ("transcript", "select concat_ws(' ', epoch, state, last_seq, bytes, end_record, gap, 'cut', cut_first, cut_last, cut_bytes, cut_reason) from transcript order by epoch"),
    ("delivery", "select concat_ws(' ', n, state, answer, secret is not null, body #>> '{data,run,state}', body #>> '{data,run,result,text}') from delivery order by n"),
    ("part", "select concat_ws(' ', delivery.n, about, delivery_part.n, sent_at is not null) from delivery_part join delivery on id = delivery_id order by delivery.n, about, delivery_part.n"),
    ("output", "select concat_ws(' ', name, epoch, size, status, reason, object_key is not null) from output order by name"),
    ("file", "select concat_ws(' ', name, expired_at is not null) from file order by name"),
    ("upload", "select concat_ws(' ', name, received, parts, completed_at is not null, file_id is not null, (select count(*) from upload_part where upload_id = upload.id)) from upload"),
    ("session", "select concat_ws(' ', agent_name) from session"),
    ("tenant", "select concat_ws(' ', transcripts_kept_from > 'epoch', outputs_kept_from > 'epoch') from tenant order by created_at"),
    ("object", "select concat_ws(' ', state, count(*)) from object group by state order by state"),
    ("idempotency", "select concat_ws(' ', split_part(route, ' ', 1), key) from idempotency order by route, key"),
    ("inbound", "select concat_ws(' ', state, reason, raw is not null, run_id is not null, thread_id is not null) from inbound order by created_at, id"),
    ("thread", "select concat_ws(' ', agent_name, (select count(*) from thread_message where thread_id = thread.id)) from thread order by created_at, id"),
    ("left", "select concat_ws(' ', 'outbox', (select count(*) from outbox), 'attempt', (select count(*) from attempt), 'dead', (select count(*) from dead),
        'timer', (select string_agg(kind, ' ' order by kind) from timer))"),
];

impl World {
    pub async fn digest(&self) -> Result<String> {
        let mut text = String::new();
        for (name, sql) in PARTS {
            let rows: Vec<String> = sqlx::query_scalar(sql).fetch_all(self.db()).await.with_context(|| format!("digest of {name}"))?;
            text.extend(rows.into_iter().map(|row| format!("{name} {row}\n")));
        }
        Ok(format!("{text}{}{}{}", self.chunks().await?, self.printed().await?, self.told()))
    }

    /// The digest without the order in which things happened.
    pub async fn outcome(&self) -> Result<String> {
        Ok(self.digest().await?.lines().filter(|line| !line.starts_with("history ")).map(|line| format!("{line}\n")).collect())
    }

    /// Chunks lie one behind the other, from the first frame to the last.
    async fn chunks(&self) -> Result<String> {
        let chunks: Vec<(i32, i64, i64)> =
            sqlx::query_as("select epoch, first_seq, last_seq from chunk order by epoch, first_seq").fetch_all(self.db()).await?;
        let whole = chunks.windows(2).all(|pair| pair[0].0 != pair[1].0 || pair[0].2 + 1 == pair[1].1);
        Ok(format!("chunks without a hole: {whole}\n"))
    }

    /// What a reader gets, byte for byte: every object that is referred to is really there.
    async fn printed(&self) -> Result<String> {
        let runs: Vec<(sqlx::types::Uuid, sqlx::types::Uuid)> =
            sqlx::query_as("select tenant_id, id from run order by created_at, id").fetch_all(self.db()).await?;
        let mut text = String::new();
        for (tenant, run) in runs {
            let mut pieces = reader::read(&self.second.chassis, TenantId::from(tenant), run.into(), Cursor::default());
            while let Some(piece) = pieces.recv().await {
                match piece.context("read the transcript")? {
                    Piece::Frames(frames) => {
                        for frame in frames {
                            text.push_str(&format!(
                                "frame {} {} {} {:?}\n",
                                frame.epoch,
                                frame.seq,
                                frame.kind.name(),
                                String::from_utf8_lossy(&frame.payload)
                            ));
                        }
                    }
                    Piece::Gap { epoch, gap, .. } => text.push_str(&format!("frame gap {epoch} {}\n", gap.reason)),
                    Piece::Damaged { epoch, reason, .. } => text.push_str(&format!("frame damaged {epoch} {reason}\n")),
                    Piece::Tip { closed } => text.push_str(&format!("frame tip {closed}\n")),
                }
            }
        }
        let objects: Vec<String> =
            sqlx::query_scalar("select object_key from output where object_key is not null order by name").fetch_all(self.db()).await?;
        for key in objects {
            let bytes = self.second.chassis.store.get(&key).await?;
            text.push_str(&format!("output {:?}\n", String::from_utf8_lossy(&bytes)));
        }
        Ok(text)
    }

    /// Posts count by their id: a receiver that sees one twice sees the same id.
    fn told(&self) -> String {
        let mut ids = self.posts();
        ids.sort_unstable();
        ids.dedup();
        let posted = self.slack.messages(CHANNEL).len();
        format!("results told: {}\nposted in Slack: {posted}\nsupervisors: {}\n", ids.len(), self.supervisors())
    }
}
