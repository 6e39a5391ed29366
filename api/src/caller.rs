//! Who asks, proved by a bearer token; the scope is part of the handler's signature.

use axum::{
    extract::FromRequestParts,
    http::{header, request::Parts},
};
use towpath_chassis::Error;
use towpath_schemas::ErrorCode;
use towpath_tenant::{Caller, Scope};

use crate::{
    Api,
    answer::{Answer, Refusal},
};

async fn caller(parts: &Parts, api: &Api) -> Answer<Caller> {
    let unauthorized = |detail: &str| Refusal(Error::refused(ErrorCode::Unauthorized, detail));
    let value = parts.headers.get(header::AUTHORIZATION).ok_or_else(|| unauthorized("there is no Authorization header"))?;
    let text = value.to_str().map_err(|_| unauthorized("the Authorization header is not ASCII"))?;
    let token = text.strip_prefix("Bearer ").ok_or_else(|| unauthorized("the Authorization header is no `Bearer` token"))?;
    let known = tokio::time::timeout(api.chassis.config.limits.database_wait, api.callers.authenticate(token.trim())).await;
    let known = known.map_err(|_| Refusal(Error::refused(ErrorCode::Unavailable, "the database does not answer")))??;
    known.ok_or_else(|| unauthorized("the token is unknown, expired or revoked"))
}

macro_rules! scoped {
    ($(#[$doc:meta])* $name:ident, $scope:expr) => {
        $(#[$doc])*
        pub struct $name(pub Caller);

        impl FromRequestParts<Api> for $name {
            type Rejection = Refusal;

            async fn from_request_parts(parts: &mut Parts, api: &Api) -> Answer<Self> {
                let caller = caller(parts, api).await?;
                caller.may($scope)?;
                Ok(Self(caller))
            }
        }
    };
}

scoped!(/** May start, see and steer the tenant's runs. */ Runs, Scope::Runs);
scoped!(/** May change agents, tokens and tenants. */ Admin, Scope::Admin);
