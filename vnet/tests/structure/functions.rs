//! Measures functions: number of parameters and number of lines.

use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Block, Signature};

use crate::modules::{is_test, parse};

pub struct Function {
    pub name: String,
    /// Number of parameters, without `self`. `None` in `impl Trait for`: the trait defines them, and is measured itself if it
    /// belongs to the project.
    pub parameters: usize,
    /// Number of lines from `fn` to the last brace; 1 without a body.
    pub lines: usize,
}

/// All functions of a source except tests, with and without bodies.
pub fn functions(file: &Path, text: &str) -> Vec<Function> {
    let mut reader = Reader { found: vec![], of_trait: false };
    reader.visit_file(&parse(file, text));
    reader.found
}

struct Reader {
    found: Vec<Function>,
    /// True inside `impl Trait for`.
    of_trait: bool,
}

impl Reader {
    fn enter(&mut self, signature: &Signature, body: Option<&Block>) {
        let typed = signature.inputs.iter().filter(|input| matches!(input, syn::FnArg::Typed(_)));
        let parameters = if self.of_trait { 0 } else { typed.count() };
        let start = signature.fn_token.span.start().line;
        let end = body.map_or(start, |body| body.brace_token.span.close().end().line);
        self.found.push(Function { name: signature.ident.to_string(), parameters, lines: end - start + 1 });
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            self.enter(&item.sig, Some(&item.block));
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if !is_test(&item.attrs) {
            let outer = std::mem::replace(&mut self.of_trait, item.trait_.is_some());
            visit::visit_item_impl(self, item);
            self.of_trait = outer;
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            self.enter(&item.sig, Some(&item.block));
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.enter(&item.sig, item.default.as_ref());
        visit::visit_trait_item_fn(self, item);
    }
}
