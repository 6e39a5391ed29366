//! `towpath tokens` and `towpath tenants`: who may do what.

use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::Value;
use towpath_schemas::body::{NewTenant, NewToken, Retention, Tenant, TenantLimits, Token};

use super::{
    api::{Api, Payload},
    failure::Failure,
    print::{Printer, time},
};

#[derive(Subcommand)]
pub enum TokensCommand {
    /// Make a token; its secret is printed this once.
    #[command(after_help = "Example:\n  towpath tokens create ci --scope runs --days 90")]
    Create {
        /// Whose it is; a principal of that name is made if there is none.
        principal: String,
        /// runs, terminal or admin; may be repeated.
        #[arg(long = "scope", default_value = "runs", value_name = "SCOPE")]
        scopes: Vec<String>,
        /// The tenant, when it is not your own.
        #[arg(long)]
        tenant: Option<String>,
        /// Days until it expires, 1 to 3650.
        #[arg(long, default_value_t = 90)]
        days: i32,
    },
    /// List tokens, without their secrets.
    List,
    /// End a token at once.
    Revoke { token: String },
}

#[derive(Subcommand)]
pub enum TenantsCommand {
    /// Make a tenant.
    Create { name: String },
    /// List tenants.
    List,
    /// Say for how many days a tenant's things are kept after their run has ended, all three; `ever` for no limit.
    #[command(after_help = "Example:\n  towpath tenants keep ten_… --transcripts 30 --files 30 --runs 365")]
    Keep {
        tenant: String,
        #[arg(long, value_name = "DAYS", value_parser = days)]
        transcripts: Days,
        /// Uploaded files and outputs.
        #[arg(long, value_name = "DAYS", value_parser = days)]
        files: Days,
        /// Runs with all that belongs to them.
        #[arg(long, value_name = "DAYS", value_parser = days)]
        runs: Days,
    },
    /// Say how many runs a tenant may have at a time; 0 for as many as there is room for.
    Limit {
        tenant: String,
        #[arg(long)]
        concurrent: i32,
    },
}

/// What is paused.
#[derive(Args)]
#[command(after_help = "Examples:\n  towpath pause --tenant ten_…\n  towpath pause --all")]
#[group(required = true, multiple = false)]
pub struct PauseArgs {
    #[arg(long, value_name = "TENANT")]
    tenant: Option<String>,
    #[arg(long)]
    all: bool,
}

pub async fn pause(api: &Api, printer: &Printer, args: PauseArgs, paused: bool) -> Result<(), Failure> {
    let (act, done) = if paused { ("pause", "paused") } else { ("resume", "resumed") };
    let path = args.tenant.as_deref().map_or_else(|| vec!["v1", act], |tenant| vec!["v1", "tenants", tenant, act]);
    let answer = api.json(Method::POST, &path, &[], Payload::Nothing).await?;
    let what = args.tenant.as_deref().unwrap_or("everything").to_owned();
    printer.answer(answer, |_, _: Value| format!("{what} is {done}\n"))
}

/// A number of days, or no limit.
#[derive(Debug, Clone, Copy)]
pub struct Days(Option<i32>);

fn days(text: &str) -> Result<Days, String> {
    if text == "ever" {
        return Ok(Days(None));
    }
    text.parse().map(|days| Days(Some(days))).map_err(|_| "a number of days, or `ever`".to_owned())
}

fn told(days: Option<i32>) -> String {
    days.map_or_else(|| "ever".to_owned(), |days| format!("{days} d"))
}

pub async fn tokens(api: &Api, printer: &Printer, command: TokensCommand) -> Result<(), Failure> {
    match command {
        TokensCommand::Create { principal, scopes, tenant, days } => {
            let path = tenant.as_deref().map_or_else(|| vec!["v1", "tokens"], |tenant| vec!["v1", "tenants", tenant, "tokens"]);
            let answer = api.post(&path, NewToken { principal, scopes, days }, None).await?;
            printer.answer(answer, |printer, token: Token| {
                printer.note(&format!(
                    "{} of {} until {}; this is its secret, shown this once:",
                    token.id,
                    token.principal_name,
                    time(token.expires_at)
                ));
                format!("{}\n", token.secret.unwrap_or_default())
            })
        }
        TokensCommand::List => {
            let answer = api.get(&["v1", "tokens"], &[]).await?;
            printer.page(answer, None, |printer, tokens: Vec<Token>| {
                let row = |token: Token| vec![token.id.to_string(), token.principal_name, token.scopes.join(" "), time(token.expires_at)];
                printer.table(&["token", "principal", "scopes", "expires"], tokens.into_iter().map(row).collect())
            })
        }
        TokensCommand::Revoke { token } => {
            let answer = api.json(Method::DELETE, &["v1", "tokens", &token], &[], Payload::Nothing).await?;
            printer.answer(answer, |_, _: Value| format!("{token} revoked\n"))
        }
    }
}

pub async fn tenants(api: &Api, printer: &Printer, command: TenantsCommand) -> Result<(), Failure> {
    match command {
        TenantsCommand::Create { name } => {
            let answer = api.post(&["v1", "tenants"], NewTenant { name }, None).await?;
            printer.answer(answer, |_, tenant: Tenant| format!("{}  {}\n", tenant.id, tenant.name))
        }
        TenantsCommand::List => {
            let answer = api.get(&["v1", "tenants"], &[]).await?;
            printer.page(answer, None, |printer, tenants: Vec<Tenant>| {
                let row = |tenant: Tenant| {
                    let Retention { transcript_days, file_days, run_days } = tenant.retention;
                    let kept = [transcript_days, file_days, run_days].map(told);
                    let limit = tenant.concurrent.map_or_else(|| "–".to_owned(), |limit| limit.to_string());
                    let state = if tenant.paused { "paused" } else { "" };
                    let more = [limit, state.to_owned(), time(tenant.created_at)];
                    [tenant.id.to_string(), tenant.name].into_iter().chain(kept).chain(more).collect()
                };
                printer.table(
                    &["tenant", "name", "transcripts", "files", "runs", "at a time", "", "created"],
                    tenants.into_iter().map(row).collect(),
                )
            })
        }
        TenantsCommand::Limit { tenant, concurrent } => {
            let limits = TenantLimits { concurrent: (concurrent != 0).then_some(concurrent) };
            let answer =
                api.json(Method::PUT, &["v1", "tenants", &tenant, "limits"], &[], Payload::Json(serde_json::json!(limits))).await?;
            printer.answer(answer, |_, limits: TenantLimits| match limits.concurrent {
                Some(limit) => format!("{tenant} may have {limit} runs at a time\n"),
                None => format!("{tenant} may have as many runs at a time as there is room for\n"),
            })
        }
        TenantsCommand::Keep { tenant, transcripts, files, runs } => {
            let retention = Retention { transcript_days: transcripts.0, file_days: files.0, run_days: runs.0 };
            let payload = Payload::Json(serde_json::json!(retention));
            let answer = api.json(Method::PUT, &["v1", "tenants", &tenant, "retention"], &[], payload).await?;
            printer.answer(answer, |_, kept: Retention| {
                let [transcripts, files, runs] = [kept.transcript_days, kept.file_days, kept.run_days].map(told);
                format!("{tenant} keeps transcripts {transcripts}, files {files}, runs {runs}\n")
            })
        }
    }
}
