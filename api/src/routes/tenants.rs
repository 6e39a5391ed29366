//! `/v1/tokens` and `/v1/tenants`.

use axum::{Json, extract::State, http::StatusCode};
use towpath_chassis::Error;
use towpath_run::admission;
use towpath_schemas::{
    ErrorCode, Problem,
    body::{NewTenant, NewToken, Page, Retention, Tenant, TenantLimits, Token},
    id::{TenantId, TokenId},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api,
    answer::{Answer, Body, Path},
    caller::Admin,
};

pub fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::new()
        .routes(routes!(create_token, list_tokens))
        .routes(routes!(revoke_token))
        .routes(routes!(create_tenant, list_tenants))
        .routes(routes!(create_tenant_token))
        .routes(routes!(keep))
        .routes(routes!(limit))
        .routes(routes!(pause_tenant))
        .routes(routes!(resume_tenant))
        .routes(routes!(pause_all))
        .routes(routes!(resume_all))
}

/// Makes a token for a principal of the caller's tenant; its secret is in this answer only.
#[utoipa::path(post, path = "/v1/tokens", request_body = NewToken, responses((status = 201, body = Token), (status = 422, body = Problem)))]
async fn create_token(State(api): State<Api>, Admin(caller): Admin, body: Body<NewToken>) -> Answer<(StatusCode, Json<Token>)> {
    Ok((StatusCode::CREATED, Json(towpath_tenant::create_token(&api.chassis, caller.tenant, &body.value).await?)))
}

/// The tenant's tokens, without secrets.
#[utoipa::path(get, path = "/v1/tokens", responses((status = 200, body = Page<Token>)))]
async fn list_tokens(State(api): State<Api>, Admin(caller): Admin) -> Answer<Json<Page<Token>>> {
    Ok(Json(Page { items: towpath_tenant::tokens(&api.chassis, caller.tenant).await?, cursor: None }))
}

/// Ends a token at once.
#[utoipa::path(delete, path = "/v1/tokens/{id}", responses((status = 204), (status = 404, body = Problem)))]
async fn revoke_token(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<TokenId>) -> Answer<StatusCode> {
    if towpath_tenant::revoke_token(&api.chassis, caller.tenant, id).await? {
        return Ok(StatusCode::NO_CONTENT);
    }
    Err(Error::refused(ErrorCode::NotFound, format!("there is no token {id}")).into())
}

/// Only an admin of the first tenant, the operator's own, sees and makes others.
pub(super) async fn operator(api: &Api, tenant: TenantId) -> Answer<()> {
    if towpath_tenant::is_operator(&api.chassis, tenant).await? {
        return Ok(());
    }
    Err(Error::refused(ErrorCode::Forbidden, "tenants are the operator's: use an admin token of the first tenant").into())
}

/// Makes a tenant.
#[utoipa::path(post, path = "/v1/tenants", request_body = NewTenant, responses((status = 201, body = Tenant), (status = 409, body = Problem)))]
async fn create_tenant(State(api): State<Api>, Admin(caller): Admin, body: Body<NewTenant>) -> Answer<(StatusCode, Json<Tenant>)> {
    operator(&api, caller.tenant).await?;
    Ok((StatusCode::CREATED, Json(towpath_tenant::create_tenant(&api.chassis, &body.value.name).await?)))
}

/// All tenants.
#[utoipa::path(get, path = "/v1/tenants", responses((status = 200, body = Page<Tenant>)))]
async fn list_tenants(State(api): State<Api>, Admin(caller): Admin) -> Answer<Json<Page<Tenant>>> {
    operator(&api, caller.tenant).await?;
    Ok(Json(Page { items: towpath_tenant::tenants(&api.chassis).await?, cursor: None }))
}

/// Makes a token of another tenant, for its first admin.
#[utoipa::path(post, path = "/v1/tenants/{id}/tokens", request_body = NewToken, responses((status = 201, body = Token), (status = 404, body = Problem)))]
async fn create_tenant_token(
    State(api): State<Api>,
    Admin(caller): Admin,
    Path(id): Path<TenantId>,
    body: Body<NewToken>,
) -> Answer<(StatusCode, Json<Token>)> {
    operator(&api, caller.tenant).await?;
    if !towpath_tenant::tenants(&api.chassis).await?.iter().any(|tenant| tenant.id == id) {
        return Err(no_such(id).into());
    }
    Ok((StatusCode::CREATED, Json(towpath_tenant::create_token(&api.chassis, id, &body.value).await?)))
}

/// Says how long a tenant's transcripts, files and runs are kept. What is over its time goes within minutes, and does not come back.
#[utoipa::path(put, path = "/v1/tenants/{id}/retention", request_body = Retention, responses((status = 200, body = Retention), (status = 404, body = Problem), (status = 422, body = Problem)))]
async fn keep(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<TenantId>, body: Body<Retention>) -> Answer<Json<Retention>> {
    if id != caller.tenant {
        operator(&api, caller.tenant).await?;
    }
    if towpath_tenant::keep(&api.chassis, id, body.value).await? {
        return Ok(Json(body.value));
    }
    Err(no_such(id).into())
}

fn no_such(id: TenantId) -> Error {
    Error::refused(ErrorCode::NotFound, format!("there is no tenant {id}"))
}

/// Says how many runs a tenant may have at a time. Those that go on beyond it end as they would have.
#[utoipa::path(put, path = "/v1/tenants/{id}/limits", request_body = TenantLimits, responses((status = 200, body = TenantLimits), (status = 404, body = Problem), (status = 422, body = Problem)))]
async fn limit(
    State(api): State<Api>,
    Admin(caller): Admin,
    Path(id): Path<TenantId>,
    body: Body<TenantLimits>,
) -> Answer<Json<TenantLimits>> {
    operator(&api, caller.tenant).await?;
    let mut work = api.chassis.begin().await?;
    if !towpath_tenant::limit(&mut work, id, body.value.concurrent).await? {
        return Err(no_such(id).into());
    }
    admission::announce_all(&mut work).await?;
    work.commit().await?;
    Ok(Json(body.value))
}

/// Starts nothing of a tenant until it is resumed. Its requests are accepted and wait; what runs goes on.
#[utoipa::path(post, path = "/v1/tenants/{id}/pause", responses((status = 204), (status = 404, body = Problem)))]
async fn pause_tenant(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<TenantId>) -> Answer<StatusCode> {
    operator(&api, caller.tenant).await?;
    pause(&api, Some(id), true).await
}

/// Lets a tenant go on.
#[utoipa::path(post, path = "/v1/tenants/{id}/resume", responses((status = 204), (status = 404, body = Problem)))]
async fn resume_tenant(State(api): State<Api>, Admin(caller): Admin, Path(id): Path<TenantId>) -> Answer<StatusCode> {
    operator(&api, caller.tenant).await?;
    pause(&api, Some(id), false).await
}

/// Starts nothing at all until everything is resumed. Requests are accepted and wait; what runs goes on.
#[utoipa::path(post, path = "/v1/pause", responses((status = 204)))]
async fn pause_all(State(api): State<Api>, Admin(caller): Admin) -> Answer<StatusCode> {
    operator(&api, caller.tenant).await?;
    pause(&api, None, true).await
}

/// Lets everything go on.
#[utoipa::path(post, path = "/v1/resume", responses((status = 204)))]
async fn resume_all(State(api): State<Api>, Admin(caller): Admin) -> Answer<StatusCode> {
    operator(&api, caller.tenant).await?;
    pause(&api, None, false).await
}

async fn pause(api: &Api, tenant: Option<TenantId>, paused: bool) -> Answer<StatusCode> {
    let mut work = api.chassis.begin().await?;
    match tenant {
        None => towpath_tenant::pause_all(&mut work, paused).await?,
        Some(id) if towpath_tenant::pause(&mut work, id, paused).await? => {}
        Some(id) => return Err(no_such(id).into()),
    }
    if !paused {
        admission::announce_all(&mut work).await?;
    }
    work.commit().await?;
    Ok(StatusCode::NO_CONTENT)
}
