//! OpenAPI schemas of requests and answers, from the declarations.

use serde_json::{Map, Value as Json, json};
use utoipa::openapi::{RefOr, Schema};

use super::interface::INTERFACE;
use super::key::{Applies, Described, Takes};
use super::link::LINK;
use super::route::ROUTE;

/// The schema of an object with these keys; mandatory keys are required in a request.
pub(crate) fn object(about: &str, keys: &[Described], request: bool) -> RefOr<Schema> {
    let keys = || keys.iter().filter(|key| request || key.key.name != "name");
    let properties: Map<_, _> =
        keys().map(|key| (key.key.name.to_string(), property(key, request))).collect();
    let needed = |key: &&Described| request && key.key.needed.is_some() && key.key.only_for.is_empty();
    let required: Vec<_> = keys().filter(needed).map(|key| key.key.name).collect();
    let mut schema = json!({ "type": "object", "description": about, "properties": properties });
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    serde_json::from_value(schema).expect("the schema of a table of keys is one")
}

fn property(described: &Described, request: bool) -> Json {
    let Described { key, default, help, .. } = described;
    let mut about = help.clone();
    if request && !key.absent.is_empty() {
        about += &format!("; when absent: {}", key.absent);
    }
    let mut schema = match key.takes {
        Takes::Text(_) => json!({ "type": "string" }),
        Takes::Number(least, most) => json!({ "type": "integer", "minimum": least, "maximum": most }),
        Takes::Flag => json!({ "type": "boolean" }),
        Takes::Words(words) => json!({ "type": "string", "enum": words }),
        Takes::Texts(_) => json!({ "type": "array", "items": { "type": "string" } }),
        Takes::Numbers(least, most) => {
            json!({ "type": "array", "items": { "type": "integer", "minimum": least, "maximum": most } })
        }
    };
    schema["description"] = about.into();
    if let Some(default) = default.as_ref().filter(|_| request && key.needed.is_none()) {
        schema["default"] = default.clone();
    }
    schema
}

/// Implements `ToSchema` for the settings in an answer or request.
macro_rules! schema {
    ($name:ident, $keys:expr) => {
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                $crate::settings::openapi::object(
                    "Settings, by the keys of the configuration file.",
                    &$keys,
                    false,
                )
            }
        }

        impl utoipa::ToSchema for $name {}
    };
}
pub(crate) use schema;

macro_rules! request {
    ($($(#[$about:meta])* $name:ident = $text:literal, $keys:expr;)*) => {
        $(
            $(#[$about])*
            pub struct $name;

            impl utoipa::PartialSchema for $name {
                fn schema() -> RefOr<Schema> {
                    object($text, &$keys, true)
                }
            }

            impl utoipa::ToSchema for $name {}
        )*
    };
}

request! {
    /// The body of `POST /v1/interfaces`.
    NewInterface = "The body of `POST /v1/interfaces`: the keys of `[[interface]]`.", INTERFACE.described();
    /// The body of `PATCH /v1/interfaces/NAME`.
    ChangedInterface = "The body of `PATCH /v1/interfaces/NAME`: the keys that apply while the interface is open. What is \
                        absent stays.", live();
    /// The body of `POST /v1/links`.
    NewLink = "The body of `POST /v1/links`: the keys of `[[link]]`.", LINK.described();
    /// The body of `POST /v1/routes`.
    NewRoute = "The body of `POST /v1/routes`: the keys of `[[route]]`.", ROUTE.described();
}

fn live() -> Vec<Described> {
    let live = INTERFACE.described().into_iter().filter(|key| key.applies == Applies::Live);
    live.map(|key| Described { default: None, ..key }).collect()
}
