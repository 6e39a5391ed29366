//! `towpath sessions`.

use clap::Args;
use towpath_schemas::body::Session;

use super::{
    api::Api,
    failure::Failure,
    print::{Printer, time},
};

#[derive(Args)]
pub struct SessionsArgs {
    /// One session's id; without it they are listed, the newest first.
    session: Option<String>,
    /// Where the next page begins, as the last one told.
    #[arg(long)]
    cursor: Option<String>,
}

pub async fn sessions(api: &Api, printer: &Printer, args: SessionsArgs) -> Result<(), Failure> {
    if let Some(session) = args.session {
        let answer = api.get(&["v1", "sessions", &session], &[]).await?;
        return printer.answer(answer, |printer, session: Session| table(printer, vec![session]));
    }
    let query: Vec<(&str, String)> = args.cursor.into_iter().map(|cursor| ("cursor", cursor)).collect();
    let answer = api.get(&["v1", "sessions"], &query).await?;
    printer.page(answer, Some("towpath sessions"), table)
}

fn table(printer: &Printer, sessions: Vec<Session>) -> String {
    let row = |session: Session| {
        let live = session.live_run.map(|run| run.to_string()).unwrap_or_default();
        vec![
            session.id.to_string(),
            session.agent,
            session.runs.to_string(),
            time(session.created_at),
            session.place.unwrap_or_default(),
            live,
        ]
    };
    printer.table(&["session", "agent", "runs", "created", "place", "live run"], sessions.into_iter().map(row).collect())
}
