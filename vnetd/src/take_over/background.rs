//! `--take-over --detach`: the new vnetd goes on in the background. A service manager's reload needs that: its command has to end.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Starts this vnetd once more, without `--detach`, and returns when frames flow there: it then prints its one line.
///
/// # Errors
/// It has not taken over, and has said why on standard error.
pub fn start() -> Result<(), String> {
    let cannot = |error: std::io::Error| format!("cannot start vnetd in the background: {error}");
    let program = std::env::current_exe().map_err(cannot)?;
    let mut new = Command::new(program)
        .args(std::env::args_os().skip(1).filter(|argument| argument != "--detach"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(cannot)?;
    let mut ready = String::new();
    if let Some(output) = new.stdout.take() {
        BufReader::new(output).read_line(&mut ready).map_err(cannot)?;
    }
    if ready.is_empty() {
        let status = new.wait().map_err(cannot)?;
        return Err(format!("the new vnetd has not taken over: {status}"));
    }
    print!("{ready}");
    Ok(())
}
