//! One declaration is enough: a key of a test table is parsed, displayed, compared, documented and part of the schema.

use super::key::field;
use super::kinds::{flag, number, text};
use super::*;
use crate::config;

fn control_errors(control: &str) -> Vec<String> {
    let text = format!("[host]\nname = \"h\"\n[control]\n{control}\n");
    config::parse("f", &text)
        .err()
        .map(|error| error.to_string().lines().map(String::from).collect())
        .unwrap_or_default()
}

#[test]
fn control_in_clear_text_is_limited_to_loopback() {
    const TLS: &str = "tls_cert = \"/c\"\ntls_key = \"/k\"\n";
    const CA: &str = "tls_client_ca = \"/a\"\n";
    for good in [
        "http = \"127.0.0.1:9080\"\nconsole = \"[::1]:9001\"".into(),
        "http = \"127.0.0.1:0\"\nconsole = \"127.0.0.1:0\"".into(),
        format!("http = \"0.0.0.0:9080\"\n{TLS}"),
        format!("http = \"[fd00::1]:9080\"\ntoken_file = \"/t\"\n{TLS}"),
        format!("console = \"192.0.2.1:9001\"\n{TLS}{CA}"),
    ] {
        assert_eq!(control_errors(&good), Vec::<String>::new(), "{good}");
    }
    for (bad, words) in [
        ("http = \"192.0.2.1:9080\"".into(), "tls_cert and tls_key"),
        ("http = \"[::]:9080\"".into(), "clear text"),
        ("http = \"localhost:9080\"".into(), "not an address"),
        ("console = \"0.0.0.0:9001\"".into(), "tls_client_ca"),
        (format!("console = \"0.0.0.0:9001\"\n{TLS}"), "tls_client_ca"),
        (
            "console = \"127.0.0.1:1\"\nhttp = \"127.0.0.1:1\"".into(),
            "as [control] http does; choose another",
        ),
        ("tls_cert = \"/c\"".into(), "belong together"),
        ("tls_key = \"/c\"".into(), "belong together"),
        (CA.into(), "needs TLS"),
        ("token_file = \"t\"".into(), "absolute"),
    ] {
        let told = control_errors(&bad);
        assert_eq!(told.len(), 1, "{bad}: {told:?}");
        assert!(told[0].starts_with("f:") && told[0].contains(words), "{bad}: {told:?}");
    }
}

#[test]
fn access_changes_need_a_restart() {
    let at = |control: &str| {
        config::parse("f", &format!("host.name = \"h\"\n[control]\n{control}")).unwrap().desired
    };
    let (none, some) = (at(""), at("http = \"127.0.0.1:9080\""));
    let problems = restart_needed(&none, &some);
    assert_eq!(problems.len(), 1);
    assert!(problems[0].to_string().contains("http"), "{}", problems[0]);
}

/// The settings struct of an imaginary room.
#[derive(Clone, Debug, Default, PartialEq)]
struct Garden {
    kind: String,
    trees: u32,
    fenced: bool,
}

static GARDEN: Declaration<Garden> = Declaration {
    title: "[[garden]]",
    applies: Applies::Reopen,
    selector: Some(key::Selector {
        key: "kind",
        chosen: |garden| if garden.kind == "rock" { "rock" } else { "green" },
    }),
    default: || Garden { kind: "green".into(), trees: 3, fenced: false },
    fields: &[
        field!("kind", text("KIND"), |garden: Garden| garden.kind, "what grows there"),
        field!("trees", number::<u32>(1, 9), |garden: Garden| garden.trees, "how many trees")
            .unit("trees")
            .only_for(&["green"])
            .live(),
        field!("fenced", flag(), |garden: Garden| garden.fenced, "nobody gets in")
            .applies(Applies::Restart)
            .phrase("with a fence"),
    ],
};

fn garden(table: Result<KeyTable, Vec<Problem>>) -> (Garden, Vec<String>) {
    let mut notes = Notes::default();
    let item = host::read(&GARDEN, table.unwrap(), &mut notes, |_, _| ());
    (item.spec, notes.problems.iter().map(ToString::to_string).collect())
}

fn from_toml(text: &str) -> (Garden, Vec<String>) {
    garden(KeyTable::from_toml(&"f".into(), text))
}

fn from_json(text: &str) -> (Garden, Vec<String>) {
    garden(KeyTable::from_json(text.as_bytes()).map_err(|problem| vec![problem]))
}

#[test]
fn a_declared_key_is_read_and_judged() {
    let good = Garden { kind: "green".into(), trees: 5, fenced: true };
    assert_eq!(from_toml("trees = 5\nfenced = true"), (good.clone(), vec![]));
    assert_eq!(from_json(r#"{"trees": 5, "fenced": true}"#), (good, vec![]));
    for (text, want) in [
        ("tree = 5", "f:1: unknown key 'tree' in [[garden]]; did you mean 'trees'?"),
        ("statue = 5", "f:1: unknown key 'statue' in [[garden]]; known here: kind, trees, fenced"),
        ("\ntrees = 10", "f:2: trees 10 is beyond the limits; use 1 to 9"),
        ("trees = true", "f:1: 'trees' is true or false, but must be a whole number from 1 to 9"),
        ("kind = \"rock\"\ntrees = 5", "f:2: 'trees' applies to kind green only; remove it"),
    ] {
        assert_eq!(from_toml(text).1, [want], "{text}");
    }
}

#[test]
fn a_declared_key_is_shown_compared_and_documented() {
    let (is, wanted) = (from_toml("").0, from_toml("trees = 5\nfenced = true").0);
    assert_eq!(
        serde_json::Value::from(GARDEN.show(&wanted)).to_string(),
        r#"{"fenced":true,"kind":"green","trees":5}"#
    );
    assert_eq!(
        (GARDEN.phrases(&is), GARDEN.phrases(&wanted)),
        (String::new(), ", trees 5, with a fence".into())
    );
    let changed: Vec<_> = GARDEN.changed(&is, &wanted).iter().map(|c| (c.key.name, c.applies)).collect();
    assert_eq!(changed, [("trees", Applies::Live), ("fenced", Applies::Restart)]);
    let told = GARDEN.restarts(&is, &wanted, &Place::default());
    assert_eq!(told.len(), 1);
    assert_eq!(
        told[0].to_string(),
        "[[garden]] fenced changes from false to true, which takes a restart of vnetd; nothing was changed"
    );
    let text = document(&GARDEN);
    assert!(
        text.contains("| `trees` | green: how many trees | `3`; 1 to 9 trees | at once; `set` |"),
        "{text}"
    );
    let described = GARDEN.described();
    assert_eq!(
        (described[1].key.name, &*described[1].help),
        ("trees", "green: how many trees; 1 to 9 trees")
    );
}

#[cfg(feature = "openapi")]
#[test]
fn a_declared_key_has_a_schema() {
    let schema = serde_json::to_value(openapi::object("A garden.", &GARDEN.described(), true)).unwrap();
    let trees = &schema["properties"]["trees"];
    assert_eq!(
        (&trees["type"], &trees["minimum"], &trees["maximum"], &trees["default"]),
        (&"integer".into(), &1.into(), &9.into(), &3.into())
    );
    assert_eq!(schema["properties"]["fenced"]["type"], "boolean");
}

/// Each name is declared once, or once per kind, and every key has help.
#[test]
fn names_are_declared_once_per_kind() {
    fn check<S>(declaration: &Declaration<S>) {
        for (at, field) in declaration.fields.iter().enumerate() {
            let same = declaration.fields[..at].iter().filter(|other| other.key.name == field.key.name);
            for other in same {
                let both = field.key.only_for.iter().any(|kind| other.key.only_for.contains(kind));
                assert!(!both && !other.key.only_for.is_empty(), "{} {}", declaration.title, field.key.name);
            }
            assert!(!field.key.help.is_empty(), "{} {}", declaration.title, field.key.name);
        }
    }
    check(&HOST);
    check(&CONTROL);
    check(&DISPATCH);
    check(&BRIDGE);
    check(&OVERLAY);
    check(&IDENTITY);
    check(&NETWORK);
    check(&INTERFACE);
    check(&LINK);
    check(&ROUTE);
}
