//! Records when an interface's guest receives, for a time.

#![allow(unused_qualifications, reason = "utoipa writes qualified names")]

use std::time::Duration;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use utoipa::IntoParams;
use vnet_control::api;

use crate::shared::{Refused, Shared, json, with_engine};

/// Longest recording in seconds: less than what clients wait for an answer.
const SECONDS_MAX: u16 = 50;

/// Query parameters of `POST /v1/interfaces/{name}/timeline`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct TimelineQuery {
    /// Duration of the recording in seconds, 1 to 50.
    #[serde(default = "seconds")]
    seconds: u16,
}

fn seconds() -> u16 {
    5
}

/// Records when an interface's guest receives, for a few seconds: event, early notification, receive, delivery, notification, reaction
#[utoipa::path(post, path = "/v1/interfaces/{name}/timeline", params(("name" = String, Path), TimelineQuery),
    responses((status = 200, body = api::Timeline), (status = "4XX", body = api::Refusal)))]
pub async fn record(
    State(shared): State<Shared>,
    name: Result<Path<String>, PathRejection>,
    query: Result<Query<TimelineQuery>, QueryRejection>,
) -> Result<Response, Refused> {
    let (Path(name), Query(TimelineQuery { seconds })) = (name?, query?);
    if !(1..=SECONDS_MAX).contains(&seconds) {
        return Err(Refused::Request(format!("seconds is {seconds}; write 1 to {SECONDS_MAX}")));
    }
    // A task of its own ends the recording even if the client goes away meanwhile.
    let recording = tokio::spawn(async move {
        let started = name.clone();
        with_engine(shared.clone(), move |engine| Ok(engine.start_timeline(&started)?)).await?;
        tokio::time::sleep(Duration::from_secs(seconds.into())).await;
        with_engine(shared, move |engine| Ok(engine.end_timeline(&name))).await
    });
    let recorded = recording.await.map_err(|_| Refused::Request("vnetd is stopping".into()))?;
    Ok(json(StatusCode::OK, &recorded?))
}
