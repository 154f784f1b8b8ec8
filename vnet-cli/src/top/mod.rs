//! `vnet top`: rates of interfaces and links, live in a terminal (ratatui), or once as a table or JSON.
//!
//! Each interval it reads the counters and computes rates ([`model`]); [`view`] draws them. Keys are handled immediately. If
//! vnetd stops answering, the screen shows that, and polling continues, because vnetd may be restarting.

pub mod model;
mod screen;
mod view;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use model::Top;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use screen::{Screen, stats};
use serde_json::json;

use crate::client::Client;
use crate::output::{Failure, print};

/// Shows rates until the user quits, or once.
pub fn run(client: &Client<'_>, top: &Top, json: bool) -> Result<(), Failure> {
    if json || top.once || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return once(client, top, json);
    }
    let mut screen = Screen::new(client, top)?;
    let mut terminal = ratatui::try_init().map_err(|error| no_terminal(&error))?;
    let result = live(&mut screen, &mut terminal);
    ratatui::restore();
    result
}

fn no_terminal(error: &io::Error) -> Failure {
    Failure::Lines(vec![format!("cannot use the terminal: {error}; use 'vnet top --once'")])
}

/// Prints the rates of one interval.
fn once(client: &Client<'_>, top: &Top, json: bool) -> Result<(), Failure> {
    let (before, started) = (stats(client)?, Instant::now());
    std::thread::sleep(Duration::from_secs(top.interval.into()));
    let (now, time) = (stats(client)?, started.elapsed());
    let mut rows = model::rows(&before, &now, time);
    model::sort(&mut rows, top.sort, false);
    if json {
        let answer = json!({ "interval_s": time.as_secs_f64(), "ports": rows });
        return print(&format!("{answer}\n"));
    }
    print(&view::text(&rows))
}

/// Draws, polls and handles keys until the user quits.
fn live(screen: &mut Screen<'_>, terminal: &mut DefaultTerminal) -> Result<(), Failure> {
    loop {
        screen.sort_rows();
        terminal.draw(|frame| view::draw(screen, frame)).map_err(|error| no_terminal(&error))?;
        if event::poll(screen.until_refresh()).map_err(|error| no_terminal(&error))? {
            match event::read().map_err(|error| no_terminal(&error))? {
                Event::Key(key) if key.kind != KeyEventKind::Release && screen.quits(key) => return Ok(()),
                // A resize only needs a redraw.
                _ => {}
            }
        } else {
            screen.refresh();
        }
    }
}

#[cfg(test)]
mod tests;
