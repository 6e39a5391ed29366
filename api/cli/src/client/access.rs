//! `towpath tokens` and `towpath tenants`: who may do what.

use clap::Subcommand;
use reqwest::Method;
use serde_json::Value;
use towpath_schemas::body::{NewTenant, NewToken, Tenant, Token};

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
                let row = |tenant: Tenant| vec![tenant.id.to_string(), tenant.name, time(tenant.created_at)];
                printer.table(&["tenant", "name", "created"], tenants.into_iter().map(row).collect())
            })
        }
    }
}
