//! Checks the structure of the project. Reads the sources of all crates and verifies that:
//!
//! - rooms depend on each other in one direction, as `ROOMS` and `LINK_ROOMS` define, and so do all folders inside a room;
//! - no files of a crate import each other in a cycle;
//! - no source has more than 600 lines, and no function more than 70 without a reason in `LONG_FUNCTIONS`;
//! - no function on a frame's path takes more than five parameters;
//! - comments name only existing files, and use the field's words;
//! - each piece of plumbing is in one place;
//! - the data plane can be embedded without configuration files, HTTP and the store.

mod functions;
mod modules;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use modules::{Crate, Edges, circles};

/// Maximum length of a source in lines.
const FILE_LINES_MAX: usize = 600;
/// Maximum length of a function in lines.
const FUNCTION_LINES_MAX: usize = 70;
/// Maximum number of parameters of a function on a frame's path.
const PARAMETERS_MAX: usize = 5;
/// Folders and files of `vnet/src` on a frame's path.
const FRAME_WAY: [&str; 5] = ["source.rs", "interface", "dispatch", "link", "kernel"];

/// Functions that may be longer, with the reason.
const LONG_FUNCTIONS: [(&str, &str, &str); 0] = [];

/// The rooms of the data plane that each room may name. `wire` may name no room, `dispatch` all of them.
const ROOMS: [(&str, &[&str]); 21] = [
    ("wire", &[]),
    ("poll", &[]),
    ("stats", &[]),
    ("scratch", &[]),
    ("copy", &[]),
    ("unix", &["inherit"]),
    ("loader", &[]),
    ("helper", &["loader"]),
    ("netlink", &["helper"]),
    ("log_limit", &[]),
    ("listen", &[]),
    ("threads", &[]),
    ("inherit", &[]),
    ("frame", &["wire", "scratch", "copy", "stats"]),
    ("source", &["frame", "poll", "wire"]),
    (
        "interface",
        &[
            "source",
            "frame",
            "wire",
            "poll",
            "stats",
            "unix",
            "helper",
            "netlink",
            "copy",
            "log_limit",
            "threads",
            "inherit",
        ],
    ),
    ("route", &["frame", "wire", "stats", "log_limit"]),
    (
        "link",
        &[
            "source",
            "frame",
            "wire",
            "poll",
            "stats",
            "helper",
            "netlink",
            "scratch",
            "log_limit",
            "listen",
            "threads",
            "inherit",
        ],
    ),
    ("capture", &["frame", "wire", "stats"]),
    ("kernel", &["frame", "wire", "stats", "listen", "helper", "loader"]),
    (
        "dispatch",
        &[
            "source",
            "frame",
            "wire",
            "poll",
            "stats",
            "interface",
            "route",
            "link",
            "capture",
            "kernel",
            "threads",
            "inherit",
        ],
    ),
];

/// Files that proofs and models of every room name, in tests only.
const PROOFS: [&str; 2] = ["proof", "loomed"];

/// The rooms of a link: each may name those before it in this list.
const LINK_ROOMS: [&str; 7] = ["socket", "path", "sealed", "rendezvous", "vxlan", "native", "stream"];

/// Root files of all crates.
const ROOTS: [(&str, &str); 7] = [
    ("vnet/src", "lib.rs"),
    ("vnet-control/src", "lib.rs"),
    ("vnetd/src", "lib.rs"),
    ("vnetd/src", "main.rs"),
    ("vnet-cli/src", "main.rs"),
    ("interconnect/src", "lib.rs"),
    ("interconnect/guest/src", "main.rs"),
];

/// Crates that a machine monitor which embeds the data plane must not have to build.
const NOT_IN_THE_DATA_PLANE: [&str; 7] =
    ["toml", "serde_json", "utoipa", "clap", "tokio", "hyper", "etcd-client"];

/// Plumbing that belongs in one place: text of the code, and the only files that may contain it.
const ONCE: [(&str, &[&str]); 3] = [
    // The interconnect does not depend on the data plane: applications link it.
    ("libc::msghdr", &["vnet/src/link/socket/message.rs", "interconnect/src/node/socket.rs"]),
    // `interface` reads a packet socket's auxiliary data, because it does not see `link`.
    ("libc::cmsghdr", &["vnet/src/link/socket/message.rs", "vnet/src/interface/local/packet.rs"]),
    // Locks are parking_lot's, which have no poisoning.
    ("PoisonError", &[]),
];

/// Lists the `faults` of this `kind` and fails if there are any.
fn assert_none(kind: &str, faults: impl IntoIterator<Item = String>) {
    let found: BTreeSet<String> = faults.into_iter().map(|fault| format!("{kind}: {fault}")).collect();
    assert!(found.is_empty(), "{found:#?}");
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn read(file: &Path) -> String {
    fs::read_to_string(repository().join(file)).unwrap()
}

/// The project's files with one of these extensions.
fn sources(extensions: &[&str]) -> Vec<PathBuf> {
    let mut files = text::files(&repository());
    files.retain(|file| text::has_extension(file, extensions));
    assert!(!files.is_empty(), "no {extensions:?}");
    files
}

fn is_test_file(file: &Path) -> bool {
    let stem = file.file_stem().unwrap().to_string_lossy();
    stem == "tests"
        || stem.ends_with("_tests")
        || stem.ends_with("_model")
        || stem.ends_with("_proofs")
        || file.iter().any(|folder| folder == "tests")
}

/// The room of a file of `vnet/src`: the first part of its path.
fn room(file: &Path) -> &str {
    file.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs")
}

#[test]
fn rooms_depend_one_way() {
    let source = repository().join("vnet/src");
    let rooms: BTreeMap<&str, &[&str]> = ROOMS.into();
    let tree = Crate::read(&source, "lib.rs", true);
    let is_room = |room: &&str| *room != "lib" && !PROOFS.contains(room);
    let seen: BTreeSet<&str> = tree.files().into_iter().map(room).filter(is_room).collect();
    assert_eq!(seen, rooms.keys().copied().collect(), "ROOMS lists every room, and no other");
    let edges = tree.edges();
    let faults = edges.iter().filter_map(|((from, to), names)| {
        let (from_room, to_room) = (room(from), room(to));
        let allowed = from_room == to_room
            || from_room == "lib"
            || PROOFS.contains(&to_room)
            || rooms.get(from_room).is_some_and(|rooms| rooms.contains(&to_room));
        (!allowed && to_room != "lib").then(|| format!("{} -> {}: {names:?}", from.display(), to.display()))
    });
    assert_none("room", faults);
}

#[test]
fn rooms_of_links_depend_one_way() {
    let tree = Crate::read(&repository().join("vnet/src"), "lib.rs", false);
    let place = |file: &Path| {
        let room = file.strip_prefix("link").ok()?.iter().next()?.to_str()?;
        LINK_ROOMS.iter().position(|known| *known == room)
    };
    let seen: BTreeSet<_> = tree.files().into_iter().filter_map(place).collect();
    assert_eq!(seen.len(), LINK_ROOMS.len(), "every room of LINK_ROOMS is there");
    let edges = tree.edges();
    let faults = edges.iter().filter_map(|((from, to), names)| {
        let backward = place(from)? < place(to)?;
        backward.then(|| format!("{} -> {}: {names:?}", from.display(), to.display()))
    });
    assert_none("link room", faults);
}

/// Cycles among the subfolders of every folder, each subfolder taken as a whole.
fn folder_circles(edges: &Edges) -> BTreeSet<String> {
    let mut levels: BTreeMap<PathBuf, Edges> = BTreeMap::new();
    for ((from, to), names) in edges {
        let mut common = PathBuf::new();
        let (mut from, mut to) = (from.iter().peekable(), to.iter().peekable());
        while from.peek() == to.peek() {
            common.push(from.next().unwrap());
            to.next();
        }
        let pair = (PathBuf::from(from.next().unwrap()), PathBuf::from(to.next().unwrap()));
        if pair.0.extension().is_none() && pair.1.extension().is_none() {
            levels.entry(common).or_default().entry(pair).or_default().extend(names.iter().cloned());
        }
    }
    let mut found = BTreeSet::new();
    for (folder, edges) in levels {
        found.extend(circles(&edges).into_iter().map(|circle| format!("{}: {circle:?}", folder.display())));
    }
    found
}

#[test]
fn no_circle_of_files_or_folders() {
    let (mut files, mut folders) = (BTreeSet::new(), vec![]);
    for (source, root) in ROOTS {
        let edges = Crate::read(&repository().join(source), root, false).edges();
        // vnetd's program only calls its library.
        assert!(
            edges.len() > 1 || (source, root) == ("vnetd/src", "main.rs"),
            "{source}/{root} was not read"
        );
        for circle in circles(&edges) {
            for ((from, to), names) in &edges {
                if circle.contains(from) && circle.contains(to) {
                    println!("{source}: {} -> {}: {names:?}", from.display(), to.display());
                }
            }
            files.extend(circle.iter().map(|file| format!("{source}/{}", file.display())));
        }
        folders.extend(folder_circles(&edges).into_iter().map(|circle| format!("{source}: {circle}")));
    }
    assert_none("circle", files);
    assert_none("folders", folders);
}

#[test]
fn every_source_is_read() {
    let mut unread: BTreeSet<PathBuf> = sources(&["rs"])
        .into_iter()
        .filter(|file| ROOTS.iter().any(|(source, _)| file.starts_with(source)))
        .collect();
    for (source, root) in ROOTS {
        let tree = Crate::read(&repository().join(source), root, true);
        for file in tree.files() {
            unread.remove(&Path::new(source).join(file));
        }
    }
    assert!(unread.is_empty(), "no module: {unread:?}");
}

#[test]
fn no_source_is_too_long() {
    let long = sources(&["rs", "py", "c", "h"]).into_iter().filter_map(|file| {
        let lines = read(&file).lines().count();
        (lines > FILE_LINES_MAX).then(|| file.display().to_string())
    });
    assert_none("lines", long);
}

#[test]
fn functions_are_short() {
    let mut allowed: BTreeSet<(String, String)> =
        LONG_FUNCTIONS.iter().map(|(file, name, _)| (file.to_string(), name.to_string())).collect();
    let mut long = vec![];
    for file in sources(&["rs"]).into_iter().filter(|file| file.iter().any(|part| part == "src")) {
        if is_test_file(&file) {
            continue;
        }
        for function in functions::functions(&file, &read(&file)) {
            if function.lines > FUNCTION_LINES_MAX
                && !allowed.remove(&(file.display().to_string(), function.name.clone()))
            {
                long.push(format!("{} {}", file.display(), function.name));
            }
        }
    }
    assert_none("function", long);
    assert!(allowed.is_empty(), "no longer long: {allowed:?}");
}

#[test]
fn functions_on_the_frames_way_take_few_parameters() {
    let mut many = vec![];
    for file in sources(&["rs"]) {
        let Ok(inside) = file.strip_prefix("vnet/src") else { continue };
        if is_test_file(inside) || !FRAME_WAY.iter().any(|room| inside.starts_with(room)) {
            continue;
        }
        for function in functions::functions(&file, &read(&file)) {
            if function.parameters > PARAMETERS_MAX {
                many.push(format!("{} {}", file.display(), function.name));
            }
        }
    }
    assert_none("parameters", many);
}

#[test]
fn comments_use_plain_words_and_name_files_that_exist() {
    let files = text::files(&repository());
    let (mut phrases, mut missing) = (vec![], vec![]);
    for file in &files {
        let is_source =
            text::has_extension(file, &["rs", "py", "c", "h", "toml", "sh"]) || file.starts_with(".ci");
        if file.starts_with("vnet/tests/structure") || !(is_source || text::has_extension(file, &["md"])) {
            continue;
        }
        let content = read(file);
        phrases.extend(
            text::banned(&content).into_iter().map(|phrase| format!("{} '{phrase}'", file.display())),
        );
        if is_source {
            let names = text::named_files(&content).into_iter().filter(|name| !text::exists(&files, name));
            missing.extend(names.map(|name| format!("{} names {name}", file.display())));
        }
    }
    assert_none("phrase", phrases);
    assert_none("missing", missing);
}

#[test]
fn plumbing_has_one_place() {
    let mut repeated = vec![];
    for file in sources(&["rs"]).iter().filter(|file| !file.starts_with("vnet/tests/structure")) {
        let content = read(file);
        for (plumbing, places) in ONCE {
            if content.contains(plumbing) && !places.iter().any(|place| file == Path::new(place)) {
                repeated.push(format!("{} has {plumbing}", file.display()));
            }
        }
    }
    assert_none("plumbing", repeated);
}

#[test]
fn the_data_plane_is_embeddable() {
    let manifest = read(Path::new("vnet/Cargo.toml"));
    let dependencies = manifest.split("[dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
    let names: Vec<&str> = dependencies
        .lines()
        .filter(|line| !line.contains("optional = true"))
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .collect();
    assert!(names.contains(&"rustix"), "{names:?}");
    let unwanted = NOT_IN_THE_DATA_PLANE.iter().filter(|name| names.contains(name));
    assert_none("dependency", unwanted.map(|name| name.to_string()));
}

/// Import edges of a crate given as (file, text).
fn edges_of(files: &[(&str, &str)]) -> Vec<(String, String)> {
    let files: BTreeMap<PathBuf, String> =
        files.iter().map(|(file, text)| (PathBuf::from(file), text.to_string())).collect();
    let tree = Crate::build(&mut |file| files.get(file).cloned(), Path::new("lib.rs"), false);
    tree.edges().into_keys().map(|(a, b)| (a.display().to_string(), b.display().to_string())).collect()
}

fn edge(from: &str, to: &str) -> (String, String) {
    (from.into(), to.into())
}

#[test]
fn the_reader_sees_all_forms_of_paths() {
    let one = "pub struct One; pub fn one() {} pub const ONE: u8 = 1;";
    let imports = [
        "use crate::one::One;",
        "use super::one::{One as Other, one};",
        "use crate::{one::{self}, std}; fn f() { one::one() }",
        "fn f() { crate::one::one(); }",
        "fn f() { println!(\"{}\", [super::one::ONE]); }",
        "use crate::one as first; fn f(_: first::One) {}",
        "use crate::one::*; fn f() { one() }",
        "fn f() { use crate::one::one; one() }",
        "mod inner { fn f() { super::super::one::one() } }",
        "impl super::one::Trait for u8 {} use crate::one::Trait;",
        "use crate::One;",
        "fn f() -> Option<super::One> { None }",
    ];
    for import in imports {
        let files = [
            ("lib.rs", "mod one; mod two; pub use one::One;"),
            ("one.rs", &*format!("{one} pub trait Trait {{}}")),
            ("two.rs", import),
        ];
        assert_eq!(edges_of(&files), [edge("two.rs", "one.rs")], "{import}");
    }
    let others = [
        "use std::one::One;",
        "fn f() { let one = 1; x.one(); }",
        "// use crate::one::One;",
        "macro_rules! m { () => { $crate::one::one() } }",
        "#[cfg(test)] mod tests { use crate::one::One; }",
        "#[cfg(test)] use crate::one::One; #[test] fn f() { crate::one::one() }",
        "use one::One;",
    ];
    for other in others {
        let files = [("lib.rs", "mod one; mod two;"), ("one.rs", one), ("two.rs", other)];
        assert_eq!(edges_of(&files), [], "{other}");
    }
}

#[test]
fn the_reader_finds_files_and_circles() {
    // A re-export leads to the definition, and is an edge only for a file that also uses the name.
    let files = [
        ("lib.rs", "mod room;"),
        (
            "room/mod.rs",
            "mod a; mod b; #[path = \"c_file.rs\"] mod c; pub use a::A; pub struct Common(c::C, a::deep::Deep);",
        ),
        ("room/a.rs", "mod deep; use super::Common; pub struct A;"),
        ("room/a/deep.rs", "use crate::room::{A, c::C}; pub struct Deep;"),
        ("room/b.rs", "use super::c::C;"),
        ("room/c_file.rs", "use super::b; pub struct C; fn f() { b::f() }"),
    ];
    let edges = edges_of(&files);
    let expected = [
        edge("room/a/deep.rs", "room/a.rs"),
        edge("room/a/deep.rs", "room/c_file.rs"),
        edge("room/a.rs", "room/mod.rs"),
        edge("room/b.rs", "room/c_file.rs"),
    ];
    assert_eq!(edges, expected, "b has no f, and what room/mod.rs uses of its own files is no import");
    let graph = |edges: &[(&str, &str)]| -> Edges {
        edges.iter().map(|(a, b)| ((a.into(), b.into()), BTreeSet::new())).collect()
    };
    assert!(circles(&graph(&[("a", "b"), ("b", "c"), ("a", "c")])).is_empty());
    let found = circles(&graph(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("e", "f"), ("f", "e")]));
    assert_eq!(found, [["a", "b", "c"].map(PathBuf::from).into(), ["e", "f"].map(PathBuf::from).into()]);
    let edges = graph(&[("link/a/x.rs", "link/b/y.rs"), ("link/b/z.rs", "link/a/w.rs"), ("a.rs", "b.rs")]);
    assert!(circles(&edges).is_empty());
    assert_eq!(folder_circles(&edges), [r#"link: {"a", "b"}"#.to_string()].into());
}

#[test]
fn the_reader_measures_functions() {
    let text = "impl Other for S { fn x(a: u8) {} }\ntrait T { fn a(&self, b: u8, (c, d): (u8, u8)); }\nimpl S {\n    fn b(\n    ) {\n    }\n}\n\
                #[test]\nfn c() {}\nmod m { fn d(_: u8) {\n} }\n#[cfg(test)] mod t { fn e() {} }";
    let found: Vec<_> = functions::functions(Path::new("x.rs"), text)
        .into_iter()
        .map(|function| (function.name, function.parameters, function.lines))
        .collect();
    let function = |name: &str, parameters, lines| (name.to_string(), parameters, lines);
    assert_eq!(found, [function("x", 0, 1), function("a", 2, 1), function("b", 0, 3), function("d", 1, 2)]);
}

#[test]
fn the_reader_understands_comments() {
    let text = "// As the design\n/// page has it: see `link/a.rs`, b.py.\nlet x = \"c.rs\"; x.c\n# d.md/e.h ...c\n#[path = \"f.rs\"]";
    assert_eq!(text::banned(text), ["design page"]);
    assert_eq!(text::named_files(text), ["b.py", "link/a.rs"].map(String::from).into());
    let files = [PathBuf::from("vnet/src/link/a.rs")];
    assert!(text::exists(&files, "link/a.rs") && text::exists(&files, "a.rs"));
    assert!(!text::exists(&files, "nk/a.rs") && !text::exists(&files, "other/a.rs"));
}
