//! `/v1/stuck`: what has not moved for longer than it should, and what would move it. The operator's.

use axum::{Json, extract::State};
use towpath_chassis::{Chassis, Result, stuck};
use towpath_schemas::{
    Problem,
    body::{Page, Stuck},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::tenants::operator;
use crate::{Api, answer::Answer, caller::Admin};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new().routes(routes!(list))
}

/// Every kind, those of which there are none with a count of 0.
pub(super) async fn all(chassis: &Chassis) -> Result<Vec<Stuck>> {
    let db = &chassis.db;
    let mut all = stuck::of_chassis(db).await?;
    all.extend(towpath_run::stuck(db).await?);
    all.extend(towpath_sandbox::stuck(db).await?);
    all.extend(towpath_transcript::stuck(db).await?);
    all.extend(towpath_delivery::stuck(db).await?);
    all.extend(towpath_channel::stuck(db).await?);
    Ok(all)
}

/// What is stuck, with one of each kind and what to do about it; nothing when all is well.
#[utoipa::path(get, path = "/v1/stuck", responses((status = 200, body = Page<Stuck>), (status = 403, body = Problem)))]
async fn list(State(api): State<Api>, Admin(caller): Admin) -> Answer<Json<Page<Stuck>>> {
    operator(&api, caller.tenant).await?;
    let items = all(&api.chassis).await?.into_iter().filter(|stuck| stuck.count > 0).collect();
    Ok(Json(Page { items, cursor: None }))
}
