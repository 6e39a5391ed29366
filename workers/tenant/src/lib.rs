#![doc = include_str!("../README.md")]

mod table;

pub use table::*;

use std::time::Duration;

use towpath_chassis::{
    Chassis, Error, Result,
    group::{Answer, Group, Lanes},
    secret,
};
use towpath_schemas::{
    ErrorCode,
    body::{NewToken, Token},
    id::{PrincipalId, TenantId, TokenId},
};

/// What a token may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Runs,
    Terminal,
    Admin,
}

impl Scope {
    pub fn word(self) -> &'static str {
        match self {
            Scope::Runs => "runs",
            Scope::Terminal => "terminal",
            Scope::Admin => "admin",
        }
    }

    fn from_word(word: &str) -> Option<Self> {
        [Scope::Runs, Scope::Terminal, Scope::Admin].into_iter().find(|scope| scope.word() == word)
    }
}

/// Who asks, as a token proved it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub tenant: TenantId,
    pub principal: PrincipalId,
    pub token: TokenId,
    pub scopes: Vec<Scope>,
}

impl Caller {
    pub fn may(&self, scope: Scope) -> Result<()> {
        if self.scopes.contains(&scope) {
            return Ok(());
        }
        Err(Error::refused(ErrorCode::Forbidden, format!("this token lacks the scope `{}`", scope.word())))
    }
}

/// Lookups at a time, and tokens in each.
const LANES: Lanes = Lanes { lanes: 2, most: 256, limit: Duration::from_secs(4) };

/// Looks up who asks: requests that come together share one statement. Nothing is remembered, so a token that was revoked is of no use any more.
#[derive(Clone)]
pub struct Callers(Group<Vec<u8>, Answer<Option<Caller>>>);

impl Callers {
    pub fn start(chassis: &Chassis) -> Self {
        let db = chassis.db.clone();
        Self(Group::start(&chassis.tasks, LANES, move |digests: Vec<Vec<u8>>| {
            let db = db.clone();
            async move {
                match table::callers(&db, &digests).await {
                    Ok(callers) => digests.iter().map(|digest| Ok(callers.get(digest).cloned())).collect(),
                    Err(error) => digests.iter().map(|_| Err(error.problem())).collect(),
                }
            }
        }))
    }

    /// The caller behind a bearer token's secret; None for one that is unknown, expired or revoked.
    pub async fn authenticate(&self, secret_text: &str) -> Result<Option<Caller>> {
        Ok(self.0.submit(secret::sha256(secret_text.as_bytes()).to_vec()).await??)
    }
}

/// Is this a token's secret that works?
pub async fn is_valid(chassis: &Chassis, secret_text: &str) -> Result<bool> {
    Ok(!table::callers(&chassis.db, &[secret::sha256(secret_text.as_bytes()).to_vec()]).await?.is_empty())
}

/// Makes a token, and its principal when there is none of that name. The secret is in this answer and nowhere else.
pub async fn create_token(chassis: &Chassis, tenant: TenantId, new: &NewToken) -> Result<Token> {
    if !(1..=3650).contains(&new.days) {
        return Err(Error::refused(ErrorCode::Unprocessable, "days: from 1 to 3650"));
    }
    if new.scopes.is_empty() || new.scopes.iter().any(|scope| Scope::from_word(scope).is_none()) {
        return Err(Error::refused(ErrorCode::Unprocessable, "scopes: one or more of `runs`, `terminal`, `admin`"));
    }
    if new.principal.is_empty() || new.principal.len() > 255 || new.principal.contains('\0') {
        return Err(Error::refused(ErrorCode::Unprocessable, "principal: 1 to 255 bytes without U+0000"));
    }
    let secret_text = format!("tp_{}", hex::encode(secret::random::<32>()?));
    let mut work = chassis.begin().await?;
    let principal = table::ensure_principal(&mut work, tenant, "user", &new.principal).await?;
    let id = TokenId::mint();
    let expires_at =
        table::insert_token(&mut work, id, tenant, principal, &secret::sha256(secret_text.as_bytes()), &new.scopes, new.days).await?;
    work.commit().await?;
    Ok(Token {
        id,
        tenant,
        principal,
        principal_name: new.principal.clone(),
        scopes: new.scopes.clone(),
        expires_at,
        secret: Some(secret_text),
    })
}
