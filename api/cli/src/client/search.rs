//! `towpath search`: lines of a run's transcript that hold a text.

use clap::Args;
use towpath_schemas::body::{Found, Page};

use super::{
    api::Api,
    failure::Failure,
    print::{Printer, read, time},
};

#[derive(Args)]
#[command(
    after_help = "Examples:\n  towpath search RUN \"error:\"\n  towpath search RUN -i timeout --json\n  towpath transcript RUN --after 1.41 --until 1.60      # what stands around a line that was found at 1.42"
)]
pub struct SearchArgs {
    run: String,
    /// What the lines hold; colours and control codes do not count.
    text: String,
    /// Capital and small letters are the same.
    #[arg(short, long)]
    ignore_case: bool,
}

pub async fn search(api: &Api, printer: &Printer, args: SearchArgs) -> Result<(), Failure> {
    let mut cursor: Option<String> = None;
    loop {
        let mut query = vec![("q", args.text.clone()), ("ignore_case", args.ignore_case.to_string())];
        query.extend(cursor.take().map(|cursor| ("after", cursor)));
        let page: Page<Found> = read(api.get(&["v1", "runs", &args.run, "search"], &query).await?)?;
        for found in &page.items {
            if printer.json {
                printer.line(&serde_json::to_value(found).unwrap_or_default());
                continue;
            }
            let place = printer.bold(&format!("{}.{}", found.epoch, found.seq));
            printer.out(&format!("{place}  {}  {}\n", time(found.at), printer.filter().pass(found.text.as_bytes())));
        }
        match page.cursor {
            Some(next) => cursor = Some(next),
            None => return Ok(()),
        }
    }
}
