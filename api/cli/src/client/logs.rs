//! `towpath logs`.

use clap::Args;
use futures::TryStreamExt;

use super::{api::Api, failure::Failure, follow, print::Printer, transcript};

#[derive(Args)]
#[command(after_help = "Examples:\n  towpath logs -f run_0193…\n  towpath logs run_0193… --raw > transcript")]
pub struct LogsArgs {
    run: String,
    /// Go on until the run has ended.
    #[arg(short, long)]
    follow: bool,
    /// Every byte as it was printed, control sequences too.
    #[arg(long)]
    raw: bool,
}

pub async fn logs(api: &Api, printer: &Printer, args: LogsArgs) -> Result<(), Failure> {
    if args.follow {
        let show = if args.raw { follow::Show::Raw } else { follow::Show::Safe };
        return follow::follow(api, printer, &args.run, show).await.map(drop);
    }
    let format = if args.raw { "raw" } else { "text" };
    let response = api.stream(&["v1", "runs", &args.run, "transcript"], &[("format", format.to_owned())], None).await?;
    transcript::tell_missing(printer, &response);
    let mut filter = printer.filter();
    let mut pieces = response.bytes_stream();
    while let Some(piece) = pieces.try_next().await.map_err(|error| Failure::Unreachable(format!("the transcript breaks off: {error}")))? {
        if args.raw {
            printer.bytes(&piece);
        } else {
            printer.out(&filter.pass(&piece));
        }
    }
    Ok(())
}
