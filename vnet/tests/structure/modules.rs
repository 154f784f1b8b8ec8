//! Reads a crate with `syn` and resolves every path in it to the file that defines what the path names.
//!
//! An import edge runs from the file that uses a name to the file that defines it. Re-exports (`pub use`) are followed to the
//! definition, and are an edge only if their file also uses the name. Method calls are no edges: without type information the
//! called method is unknown.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, File, Item, ItemMod, ItemUse, Meta, UseTree};

/// Maximum length of a chain of re-exports and globs that is followed.
const DEPTH_MAX: usize = 16;

/// A path as written: its identifiers in order.
type Segments = Vec<String>;

/// One module: the names that it defines, imports and uses.
struct Module {
    parent: Option<usize>,
    /// Path of the file, relative to the crate's `src`.
    file: PathBuf,
    children: BTreeMap<String, usize>,
    items: BTreeSet<String>,
    /// Names brought into scope by `use`, with the path that each stands for.
    imports: BTreeMap<String, Segments>,
    globs: Vec<Segments>,
    /// Paths in signatures, bodies and macros, and private imports.
    uses: BTreeSet<Segments>,
}

/// A crate's modules, from one root file.
pub struct Crate {
    modules: Vec<Module>,
}

/// Edges from file to file, relative to `src`: the names that the first file takes from the second.
pub type Edges = BTreeMap<(PathBuf, PathBuf), BTreeSet<String>>;

impl Crate {
    /// Reads the crate whose root is `src/root` (`lib.rs` or `main.rs`); with `tests`, includes items under `#[cfg(test)]`.
    pub fn read(src: &Path, root: &str, tests: bool) -> Crate {
        let mut files = |file: &Path| fs::read_to_string(src.join(file)).ok();
        Crate::build(&mut files, Path::new(root), tests)
    }

    /// Builds the tree from `files`, which returns a file's text, or `None` if the file does not exist.
    pub fn build(files: &mut dyn FnMut(&Path) -> Option<String>, root: &Path, tests: bool) -> Crate {
        let mut tree = Crate { modules: vec![] };
        let text = files(root).unwrap_or_else(|| panic!("{} is missing", root.display()));
        let items = parse(root, &text).items;
        let at = tree.add(None, root.to_owned());
        tree.fill(&mut Loader { files, tests }, at, Path::new(""), items);
        tree
    }

    fn add(&mut self, parent: Option<usize>, file: PathBuf) -> usize {
        self.modules.push(Module {
            parent,
            file,
            children: BTreeMap::new(),
            items: BTreeSet::new(),
            imports: BTreeMap::new(),
            globs: vec![],
            uses: BTreeSet::new(),
        });
        self.modules.len() - 1
    }

    /// Enters `items` into module `at`; the files of its submodules are in `folder`.
    fn fill(&mut self, loader: &mut Loader, at: usize, folder: &Path, items: Vec<Item>) {
        for item in items {
            if !loader.tests && is_test(attributes(&item)) {
                continue;
            }
            match item {
                Item::Use(item) => {
                    let private = matches!(item.vis, syn::Visibility::Inherited);
                    self.import(at, leaves(&item.tree), private);
                }
                Item::Mod(item) => self.submodule(loader, at, folder, item),
                item => {
                    self.modules[at].items.extend(defined(&item));
                    let mut uses = Uses { tests: loader.tests, found: BTreeSet::new(), imports: vec![] };
                    uses.visit_item(&item);
                    self.modules[at].uses.extend(uses.found);
                    // A `use` inside a function counts as the module's, but never as a re-export.
                    self.import(at, uses.imports, true);
                }
            }
        }
    }

    fn submodule(&mut self, loader: &mut Loader, at: usize, folder: &Path, item: ItemMod) {
        let name = item.ident.to_string();
        let below = folder.join(&name);
        let (file, items, below) = match item.content {
            Some((_, items)) => (self.modules[at].file.clone(), items, below),
            None => {
                let own = self.modules[at].file.parent().unwrap_or(Path::new("")).to_owned();
                let candidates = match path_attribute(&item.attrs) {
                    Some(path) => vec![own.join(path)],
                    None => vec![folder.join(format!("{name}.rs")), below.join("mod.rs")],
                };
                let found = candidates
                    .iter()
                    .find_map(|file| Some((file.clone(), (loader.files)(file)?)))
                    .unwrap_or_else(|| panic!("module {name}: no file among {candidates:?}"));
                (found.0.clone(), parse(&found.0, &found.1).items, below)
            }
        };
        let child = self.add(Some(at), file);
        self.modules[at].children.insert(name, child);
        self.fill(loader, child, &below, items);
    }

    fn import(&mut self, at: usize, leaves: Vec<Leaf>, private: bool) {
        for (path, name) in leaves {
            let module = &mut self.modules[at];
            if private {
                module.uses.insert(path.clone());
            }
            match name {
                Some(name) => drop(module.imports.insert(name, path)),
                None => module.globs.push(path),
            }
        }
    }

    /// The module that defines the name of `path` in module `at`; `None` for a name of another crate, a local variable, or a name
    /// of the module itself.
    fn resolve(&self, at: usize, path: &[String], depth: usize) -> Option<usize> {
        if depth == DEPTH_MAX {
            return None;
        }
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => self.walk(0, rest, depth),
            "self" => self.walk(at, rest, depth),
            "super" => self.walk(self.modules[at].parent?, rest, depth),
            _ => self.walk(at, path, depth),
        }
    }

    /// Like `resolve`, for a path that begins inside module `at`.
    fn walk(&self, at: usize, path: &[String], depth: usize) -> Option<usize> {
        let (first, rest) = path.split_first()?;
        let module = &self.modules[at];
        if first == "super" {
            return self.walk(module.parent?, rest, depth);
        }
        if let Some(child) = module.children.get(first) {
            return self.walk(*child, rest, depth);
        }
        if module.items.contains(first) {
            return Some(at);
        }
        if let Some(import) = module.imports.get(first) {
            // `use std::fs` in a module `fs` names the other crate.
            if import.first() == Some(first) {
                return None;
            }
            return self.resolve(at, &[import, rest].concat(), depth + 1);
        }
        module.globs.iter().find_map(|glob| self.resolve(at, &[glob, path].concat(), depth + 1))
    }

    /// True if module `at` lies in module `outer`.
    fn is_inside(&self, at: usize, outer: usize) -> bool {
        std::iter::successors(self.modules[at].parent, |&at| self.modules[at].parent).any(|at| at == outer)
    }

    /// Import edges between files. A module's use of its own submodules is not an import.
    pub fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (at, module) in self.modules.iter().enumerate() {
            for path in &module.uses {
                let Some(definer) = self.resolve(at, path, 0) else { continue };
                let (from, to) = (&module.file, &self.modules[definer].file);
                if from != to && !self.is_inside(definer, at) {
                    let name = path.last().cloned().unwrap_or_default();
                    edges.entry((from.clone(), to.clone())).or_default().insert(name);
                }
            }
        }
        edges
    }

    /// All files of the crate.
    pub fn files(&self) -> BTreeSet<&Path> {
        self.modules.iter().map(|module| module.file.as_path()).collect()
    }
}

struct Loader<'a> {
    files: &'a mut dyn FnMut(&Path) -> Option<String>,
    tests: bool,
}

pub fn parse(file: &Path, text: &str) -> File {
    syn::parse_file(text).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// One name that a `use` brings into scope, with its whole path; a glob has no name.
type Leaf = (Segments, Option<String>);

fn leaves(tree: &UseTree) -> Vec<Leaf> {
    let mut leaves = vec![];
    flatten(tree, &mut vec![], &mut leaves);
    leaves
}

fn flatten(tree: &UseTree, before: &mut Segments, leaves: &mut Vec<Leaf>) {
    let with = |before: &[String], ident: &syn::Ident| [before, &[ident.to_string()]].concat();
    match tree {
        UseTree::Path(path) => {
            before.push(path.ident.to_string());
            flatten(&path.tree, before, leaves);
            before.pop();
        }
        UseTree::Name(name) if name.ident == "self" => {
            leaves.push((before.clone(), before.last().cloned()));
        }
        UseTree::Name(name) => leaves.push((with(before, &name.ident), Some(name.ident.to_string()))),
        UseTree::Rename(name) if name.ident == "self" => {
            leaves.push((before.clone(), Some(name.rename.to_string())));
        }
        UseTree::Rename(name) => leaves.push((with(before, &name.ident), Some(name.rename.to_string()))),
        UseTree::Glob(_) => leaves.push((before.clone(), None)),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, before, leaves)),
    }
}

/// True if an item exists in tests only. `any(test, feature = "test-util")` does not count, because other crates also build it.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let text = list.tokens.to_string().replace(' ', "");
            text == "test" || text == "any(test,kani)" || text.starts_with("all(test,")
        }
        _ => false,
    })
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
            _ => None,
        },
        _ => None,
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The names that an item defines. A macro call defines every name that looks like a definition in its tokens.
fn defined(item: &Item) -> Vec<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        Item::Macro(item) => match &item.ident {
            Some(ident) => ident,
            None => return defined_in(item.mac.tokens.clone()),
        },
        _ => return vec![],
    };
    vec![ident.to_string()]
}

fn defined_in(tokens: TokenStream) -> Vec<String> {
    let mut found = vec![];
    let mut definition = false;
    for token in tokens {
        if let TokenTree::Ident(ident) = &token {
            if definition {
                found.push(ident.to_string());
            }
            let words = ["struct", "enum", "fn", "static", "const", "type", "trait"];
            definition = words.iter().any(|word| ident == word);
        } else {
            definition = false;
        }
    }
    found
}

/// Collects the paths of an item, including those in the tokens of macros.
struct Uses {
    tests: bool,
    found: BTreeSet<Segments>,
    imports: Vec<Leaf>,
}

impl<'ast> Visit<'ast> for Uses {
    fn visit_item(&mut self, item: &'ast Item) {
        if self.tests || !is_test(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if self.tests || !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.imports.extend(leaves(&item.tree));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.found.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        paths_in(call.tokens.clone(), &mut self.found);
    }
}

/// Paths in tokens: identifiers joined by `::`. `.name` is a field or a method, and `$crate::name` belongs to the macro's caller.
fn paths_in(tokens: TokenStream, found: &mut BTreeSet<Segments>) {
    // `skip`: the current path is a field, a method, or starts with `$crate`, so it names nothing in this crate. `fresh`: the
    // next path starts that way, because the last token was `.` or `$`.
    let (mut path, mut colons, mut skip, mut fresh) = (Segments::new(), 0, false, false);
    let mut end = |path: &mut Segments| {
        let path = std::mem::take(path);
        if !path.is_empty() {
            found.insert(path);
        }
    };
    let mut groups = vec![];
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                if colons != 2 {
                    end(&mut path);
                    skip = fresh;
                }
                if !skip {
                    path.push(ident.to_string());
                }
                (colons, fresh) = (0, false);
            }
            TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
            other => {
                end(&mut path);
                fresh = matches!(&other, TokenTree::Punct(punct) if matches!(punct.as_char(), '.' | '$'));
                colons = 0;
                if let TokenTree::Group(group) = other {
                    groups.push(group.stream());
                }
            }
        }
    }
    end(&mut path);
    groups.into_iter().for_each(|tokens| paths_in(tokens, found));
}

/// Sets of files that all depend on each other (strongly connected components, computed by plain reachability: there are some
/// hundred files).
pub fn circles(edges: &Edges) -> Vec<BTreeSet<PathBuf>> {
    let mut next: BTreeMap<&Path, BTreeSet<&Path>> = BTreeMap::new();
    for (from, to) in edges.keys() {
        next.entry(from).or_default().insert(to);
    }
    let reach = |start: &Path| -> BTreeSet<&Path> {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start]);
        while let Some(at) = open.pop() {
            let new = next.get(at).into_iter().flatten().filter(|to| seen.insert(**to));
            open.extend(new.copied().collect::<Vec<_>>());
        }
        seen
    };
    let reached: BTreeMap<&Path, BTreeSet<&Path>> = next.keys().map(|file| (*file, reach(file))).collect();
    let mut found = BTreeSet::new();
    for (file, others) in &reached {
        let circle: BTreeSet<PathBuf> = others
            .iter()
            .filter(|other| reached.get(*other).is_some_and(|back| back.contains(file)))
            .map(|other| other.to_path_buf())
            .collect();
        if circle.len() > 1 {
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}
