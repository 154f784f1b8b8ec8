//! `vnet save`: writes the running state as a configuration file.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::args::Save;
use crate::client::Client;
use crate::output::{Failure, print};

/// The first lines of a saved file.
const HEAD: &str = "\
# The state of a running vnetd, written by 'vnet save'. Keys at their defaults are left out, and so are the links and
# addresses that [overlay] computes.

";

/// Saves to a file, or to standard output.
pub fn run(client: &Client<'_>, Save { file, force }: &Save) -> Result<(), Failure> {
    let text = HEAD.to_string() + &String::from_utf8_lossy(&client.post("/v1/save", vec![])?);
    let Some(file) = file else { return print(&text) };
    let name = file.display();
    if !force && file.exists() {
        let line = format!("{name} is there already; --force replaces it, with its comments");
        return Err(Failure::Lines(vec![line]));
    }
    write(file, &text).map_err(|error| Failure::Lines(vec![format!("{name}: cannot write: {error}")]))?;
    print(&format!("{name}: saved\n"))
}

/// Writes a temporary file, then renames it, so that readers never see a partial file.
fn write(file: &Path, text: &str) -> io::Result<()> {
    let mut aside = file.as_os_str().to_os_string();
    aside.push(".new");
    let mut scratch = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    scratch.write_all(text.as_bytes())?;
    scratch.sync_all()?;
    std::fs::rename(&aside, file)
}
