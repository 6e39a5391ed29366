//! A run has settled, or its owner is to be told something before: one delivery for each of its targets, in the same transaction.

use std::time::Duration;

use towpath_chassis::{Result, Work, clock};
use towpath_delivery::{About, Owed};
use towpath_schemas::{body::Run, id::RunId, limit::WEBHOOK_BODY_BYTES};

use crate::{table, view};

pub(crate) async fn owe(work: &mut Work, runs: &[RunId], about: About) -> Result<()> {
    let targets = table::targets(work.db(), runs).await?;
    if targets.is_empty() {
        return Ok(());
    }
    let mut with_targets: Vec<RunId> = targets.iter().map(|target| target.run).collect();
    with_targets.dedup();
    let mut owed = Vec::with_capacity(targets.len());
    for run in with_targets {
        let shown = view::for_delivery(work.db(), run).await?;
        let body = body(shown.run, shown.result, about)?;
        for target in targets.iter().filter(|target| target.run == run) {
            owed.push(Owed {
                tenant: target.tenant,
                run: Some(run),
                inbound: None,
                n: target.n,
                after: Duration::ZERO,
                about,
                kind: target.kind,
                url: target.url.clone(),
                secret: target.secret.clone(),
                body: body.clone(),
                traceparent: shown.traceparent.clone(),
            });
        }
    }
    towpath_delivery::create(work, &owed).await
}

/// The body of a webhook (design section 6): at most [`WEBHOOK_BODY_BYTES`], the result cut with a link to the whole.
fn body(mut run: Run, result: Option<towpath_schemas::body::RunResult>, about: About) -> Result<serde_json::Value> {
    let link = format!("/v1/runs/{}", run.id);
    run.prompt = None;
    run.files = None;
    run.result = result;
    let make = |run: &Run| serde_json::json!({ "type": about.event(), "timestamp": clock::wall().to_rfc3339(), "data": { "run": run, "link": link } });
    loop {
        let body = make(&run);
        let over = body.to_string().len().saturating_sub(WEBHOOK_BODY_BYTES);
        if over == 0 {
            return Ok(body);
        }
        match &mut run.result {
            Some(result) if !result.text.is_empty() => {
                let mut keep = result.text.len().saturating_sub(over.max(64));
                while !result.text.is_char_boundary(keep) {
                    keep -= 1;
                }
                result.text.truncate(keep);
                result.truncated = true;
            }
            // Labels are bounded; with everything else gone the body fits.
            Some(_) | None if !run.labels.is_empty() => run.labels.clear(),
            Some(_) | None => return Ok(body),
        }
    }
}
