//! Settings in answers of the API: the keys of the file with the values that hold, whatever keys there are.

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
                    // Answers have it as a field of their own.
                    settings.remove("name");
                    $name(settings)
                }
            }

            impl $name {
                /// The value of `key` in words; empty when there is none.
                pub fn text(&self, key: &str) -> String {
                    self.0.get(key).map(plain).unwrap_or_default()
                }

                /// The value of `key` in words; `absent` when there is none.
                pub fn text_or(&self, key: &str, absent: &str) -> String {
                    self.0.get(key).map_or(absent.into(), plain)
                }

                /// The value of `key`, a number.
                pub fn number(&self, key: &str) -> Option<u64> {
                    self.0.get(key)?.as_u64()
                }

                /// The value of `key`, true or false; false when there is none.
                pub fn flag(&self, key: &str) -> bool {
                    self.0.get(key).and_then(Json::as_bool).unwrap_or(false)
                }

                /// Puts the value that holds at the moment in the place of the configured one; `None` takes it out.
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
