//! `--take-over --detach`: runs the new vnetd in the background, because systemd waits for the command of `ExecReload=` to exit.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Runs `vnetd --take-over` with the other arguments of this process as a child, and returns when the child prints that it is ready.
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
