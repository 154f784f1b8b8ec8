//! Generates `docs/reference` from the code. The test compares the files; with VNET_WRITE_DOCS=1 it writes them.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;
use vnet::stats::{DiscardReason, DropReason};
use vnet_control::language::{COMMANDS, LINE_MAX};
use vnet_control::overlay::Alarm;

use crate::handlers::{self, tests::app};
use crate::metrics::{self, Reading};

const GENERATED: &str =
    "<!-- Generated from the code by `VNET_WRITE_DOCS=1 cargo test -p vnetd reference`; do not edit. -->\n\n";

/// Escapes a table cell.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

fn console() -> String {
    let mut text = format!(
        "# The control language\n\n{GENERATED}One command per line of at most {LINE_MAX} bytes; keywords ignore case. An answer is `OK …`, \
         `ERROR reason`, or the lines of a listing ended by a line with a single dot. Words in capitals that are no keywords stand \
         for values. Empty lines and lines that begin with `#` are not answered.\n\n| command | also | what it does |\n|---|---|---|\n"
    );
    for usage in COMMANDS {
        let also =
            if usage.synonyms.is_empty() { String::new() } else { format!("`{}`", cell(usage.synonyms)) };
        writeln!(text, "| `{}` | {also} | {} |", cell(usage.syntax), cell(usage.help)).unwrap();
    }
    text
}

fn metrics_page() -> String {
    let app = app(None);
    let reading = app.shared.lock().as_ref().map(|engine| Reading::of(engine, vec![])).unwrap();
    let exposition = metrics::write(reading).unwrap();
    let mut text = format!(
        "# Metrics\n\n{GENERATED}`GET /metrics` answers with OpenMetrics text. Names end in their unit; a counter's samples end in \
         `_total`. Ports have the labels `kind` (`interface`, `link`, `bridge`, `removed`) and `port`.\n\n\
         | metric | type | meaning |\n|---|---|---|\n"
    );
    let described = |what: &str, name: &str| {
        let prefix = format!("# {what} {name} ");
        exposition.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or("").to_string()
    };
    for name in exposition.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split(' ').next()) {
        writeln!(text, "| `{name}` | {} | {} |", described("TYPE", name), cell(&described("HELP", name)))
            .unwrap();
    }
    text += "\n## Drop reasons\n\n| reason | meaning |\n|---|---|\n";
    for reason in DropReason::ALL {
        writeln!(text, "| `{}` | {} |", reason.name(), reason.help().trim()).unwrap();
    }
    text += "\n## Discard reasons\n\n| reason | meaning |\n|---|---|\n";
    for reason in DiscardReason::ALL {
        writeln!(text, "| `{}` | {} |", reason.name(), reason.help().trim()).unwrap();
    }
    text += "\n## Alarms of the overlay\n\n| alarm | meaning |\n|---|---|\n";
    for alarm in Alarm::ALL {
        writeln!(text, "| `{}` | {} |", alarm.name(), alarm.help()).unwrap();
    }
    text
}

/// A short name of a schema's type.
fn type_of(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        return reference.rsplit('/').next().unwrap_or_default().to_string();
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let named = choices.iter().map(type_of).filter(|name| name != "null");
        return named.collect::<Vec<_>>().join(" or ");
    }
    let one = |kind: &str| match kind {
        "array" => format!("list of {}", type_of(&schema["items"])),
        kind => kind.to_string(),
    };
    match &schema["type"] {
        Value::String(kind) => one(kind),
        Value::Array(kinds) => kinds
            .iter()
            .filter_map(Value::as_str)
            .filter(|kind| *kind != "null")
            .map(one)
            .collect::<Vec<_>>()
            .join(" or "),
        _ => "any".into(),
    }
}

/// Writes a row per property of a schema, including those of `allOf` and `oneOf` parts.
fn fields(schema: &Value, text: &mut String) {
    let needed: Vec<_> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let may = if needed.contains(&name.as_str()) { "" } else { ", optional" };
        let about = field["description"].as_str().unwrap_or("");
        writeln!(text, "| `{name}` | {}{may} | {} |", type_of(field), cell(about)).unwrap();
    }
    for part in ["allOf", "oneOf"].iter().flat_map(|key| schema[key].as_array().into_iter().flatten()) {
        fields(part, text);
    }
}

fn api_page() -> String {
    let document = serde_json::to_value(handlers::document()).unwrap();
    let mut text = format!(
        "# The HTTP/JSON API\n\n{GENERATED}{} Refusals are `{{\"errors\": [LINE, …]}}`. The same as an OpenAPI document: \
         `GET /v1/openapi.json`.\n\n| request | parameters | answers | what it does |\n|---|---|---|---|\n",
        document["info"]["description"].as_str().unwrap_or("")
    );
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let query = parameters.filter(|parameter| parameter["in"] == "query");
            let names: Vec<_> = query.filter_map(|p| Some(format!("`{}`", p["name"].as_str()?))).collect();
            let statuses: Vec<_> = operation["responses"].as_object().unwrap().keys().cloned().collect();
            let about = operation["summary"].as_str().unwrap_or("");
            let (method, names, statuses) = (method.to_uppercase(), names.join(", "), statuses.join(", "));
            writeln!(text, "| `{method} {path}` | {names} | {statuses} | {} |", cell(about)).unwrap();
        }
    }
    for (name, schema) in document["components"]["schemas"].as_object().unwrap() {
        let mut rows = String::new();
        fields(schema, &mut rows);
        if !rows.is_empty() {
            let about = schema["description"].as_str().unwrap_or("");
            write!(
                text,
                "\n## {name}\n\n{}\n\n| field | type | meaning |\n|---|---|---|\n{rows}",
                cell(about)
            )
            .unwrap();
        }
    }
    text
}

#[test]
fn the_reference_is_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference");
    for (name, text) in [("console.md", console()), ("metrics.md", metrics_page()), ("api.md", api_page())] {
        let file = folder.join(name);
        if std::env::var_os("VNET_WRITE_DOCS").is_some() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(&file, &text).unwrap();
        }
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            written == text,
            "{} is out of date: run VNET_WRITE_DOCS=1 cargo test -p vnetd reference",
            file.display()
        );
    }
}
