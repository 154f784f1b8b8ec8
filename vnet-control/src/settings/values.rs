//! Settings in answers of the API: keys of the configuration file with their effective values. Clients ignore unknown keys.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::host::NETWORK;
use super::interface::INTERFACE;
use super::key::plain;
use super::link::{LINK, LinkForm};
use super::route::ROUTE;
use crate::desired::{InterfaceSpec, LinkSpec, NetworkSpec, RouteSpec};

macro_rules! settings {
    ($($(#[$about:meta])* $name:ident($spec:ty) = $of:expr, $keys:expr;)*) => {
        $(
            $(#[$about])*
            #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
            #[serde(transparent)]
            pub struct $name(Map<String, Json>);

            impl From<&$spec> for $name {
                fn from(spec: &$spec) -> $name {
                    #[allow(clippy::redundant_closure_call)]
                    let mut settings = ($of)(spec);
                    // The answer has a separate field for the name.
                    settings.remove("name");
                    $name(settings)
                }
            }

            impl $name {
                /// The value of `key` as text; empty if absent.
                pub fn text(&self, key: &str) -> String {
                    self.0.get(key).map(plain).unwrap_or_default()
                }

                /// The value of `key` as text; `absent` if the key is absent.
                pub fn text_or(&self, key: &str, absent: &str) -> String {
                    self.0.get(key).map_or(absent.into(), plain)
                }

                /// The value of `key` as a number.
                pub fn number(&self, key: &str) -> Option<u64> {
                    self.0.get(key)?.as_u64()
                }

                /// The value of `key` as a flag; false if absent.
                pub fn flag(&self, key: &str) -> bool {
                    self.0.get(key).and_then(Json::as_bool).unwrap_or(false)
                }

                /// Replaces the configured value by the effective one; `None` removes it.
                pub fn set(&mut self, key: &str, value: Option<impl Into<Json>>) {
                    match value {
                        Some(value) => drop(self.0.insert(key.into(), value.into())),
                        None => drop(self.0.remove(key)),
                    }
                }
            }

            #[cfg(feature = "openapi")]
            super::openapi::schema!($name, $keys);
        )*
    };
}

settings! {
    /// The keys of `[[interface]]`.
    InterfaceSettings(InterfaceSpec) = |spec| INTERFACE.show(spec), INTERFACE.described();
    /// The keys of `[[link]]`.
    LinkSettings(LinkSpec) = |spec| LINK.show(&LinkForm::from(spec)), LINK.described();
    /// The keys of `[[network]]`.
    NetworkSettings(NetworkSpec) = |spec| NETWORK.show(spec), NETWORK.described();
    /// The keys of `[[route]]`.
    RouteSettings(RouteSpec) = |spec| ROUTE.show(spec), ROUTE.described();
}
