//! Dependencies between rooms point one way (DESIGN.md section 2). This test reads the sources and keeps it so.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What each room may name. `wire` knows nobody.
fn allowed() -> BTreeMap<&'static str, &'static [&'static str]> {
    BTreeMap::from([
        ("wire", &[][..]),
        ("poll", &[]),
        ("stats", &[]),
        ("scratch", &[]),
        ("copy", &[]),
        ("unix", &[]),
        ("netlink", &[]),
        ("frame", &["wire", "scratch", "copy", "stats"]),
        ("interface", &["frame", "wire", "poll", "stats", "unix", "netlink", "copy"]),
        ("route", &["frame", "wire", "stats"]),
        ("link", &["frame", "wire", "poll", "stats", "netlink", "scratch"]),
        ("capture", &["frame", "wire", "stats"]),
        ("dispatch", &["frame", "wire", "poll", "stats", "interface", "route", "link", "capture"]),
    ])
}

fn sources(at: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(at).unwrap().map(|e| e.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, found);
        } else if entry.extension().is_some_and(|e| e == "rs") {
            found.push(entry);
        }
    }
}

/// Rooms named in a source: whatever follows `crate::`, also inside braces (`crate::{a, b::c}`).
fn named(source: &str) -> BTreeSet<String> {
    let code: String =
        source.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut rooms = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with('$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        let ident = |text: &str| -> String {
            text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
        };
        match rest.strip_prefix('{') {
            Some(list) => {
                let (mut depth, mut start) = (0, true);
                for (i, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => start = true,
                        c if start && !c.is_whitespace() => {
                            rooms.insert(ident(&list[i..]));
                            start = false;
                        }
                        _ => {}
                    }
                }
            }
            None => {
                rooms.insert(ident(rest));
            }
        }
    }
    rooms
}

#[test]
fn dependencies_point_one_way() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let allowed = allowed();
    let mut files = vec![];
    sources(&source, &mut files);
    let mut seen = BTreeSet::new();
    let mut faults = vec![];
    for file in files {
        let path = file.strip_prefix(&source).unwrap();
        let room = path.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if room == "lib" {
            continue;
        }
        let Some(may) = allowed.get(room) else { panic!("{} is in no known room", path.display()) };
        seen.insert(room.to_owned());
        for name in named(&fs::read_to_string(&file).unwrap()) {
            if name != room && allowed.contains_key(name.as_str()) && !may.contains(&name.as_str()) {
                faults.push(format!("{} names crate::{name}", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
    assert_eq!(seen.len(), allowed.len(), "every room is there and was read: {seen:?}");
}

#[test]
fn the_reader_sees_all_forms() {
    let source = "use crate::{frame::{Batch, Mac}, link};\nfn f() { crate::route::x(); }\n// crate::stats\n$crate::poll";
    let rooms: Vec<String> = named(source).into_iter().collect();
    assert_eq!(rooms, ["frame", "link", "route"]);
}
