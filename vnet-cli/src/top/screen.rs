//! Screen state of `vnet top`, changed by keys and by new counters.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use vnet_control::api::{Stats, Status};

use super::model::{self, Sort, Top};
use crate::client::Client;
use crate::output::{Failure, read};

/// Maximum interval in seconds that the `+` key sets.
const INTERVAL_MAX: u32 = 3600;
/// Rows that a page key scrolls.
const PAGE: usize = 10;

/// Reads all counters.
pub fn stats(client: &Client<'_>) -> Result<Stats, Failure> {
    read(&client.get("/v1/stats")?)
}

/// State of the screen.
pub struct Screen<'a> {
    pub client: &'a Client<'a>,
    pub host: String,
    pub interval_s: u32,
    pub sort: Sort,
    pub reverse: bool,
    pub paused: bool,
    pub help: bool,
    /// Index of the first row shown.
    pub scroll: usize,
    pub rows: Vec<model::Row>,
    /// Why the rates are outdated; `None` if they are current.
    pub trouble: Option<String>,
    pub last: Stats,
    pub at: Instant,
}

impl<'a> Screen<'a> {
    pub fn new(client: &'a Client<'a>, top: &Top) -> Result<Screen<'a>, Failure> {
        let status: Status = read(&client.get("/v1/status")?)?;
        let last = stats(client)?;
        Ok(Screen {
            client,
            host: status.host,
            interval_s: top.interval,
            sort: top.sort,
            reverse: false,
            paused: false,
            help: false,
            scroll: 0,
            // Show the ports immediately, with zero rates.
            rows: model::rows(&last, &last, Duration::from_secs(1)),
            trouble: None,
            last,
            at: Instant::now(),
        })
    }

    /// Sorts the rows by the chosen column.
    pub fn sort_rows(&mut self) {
        model::sort(&mut self.rows, self.sort, self.reverse);
    }

    /// Time until the next reading of the counters.
    pub fn until_refresh(&self) -> Duration {
        Duration::from_secs(self.interval_s.into()).saturating_sub(self.at.elapsed())
    }

    /// Reads the counters and updates the rates.
    pub fn refresh(&mut self) {
        let time = self.at.elapsed();
        self.at = Instant::now();
        match stats(self.client) {
            Ok(now) => {
                if !self.paused {
                    self.rows = model::rows(&self.last, &now, time);
                }
                self.last = now;
                self.trouble = None;
            }
            Err(failure) => self.trouble = failure.to_string().lines().next().map(String::from),
        }
    }

    /// Handles a key; true if the user quits.
    pub fn quits(&mut self, key: KeyEvent) -> bool {
        let last = self.rows.len().saturating_sub(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('h' | '?') => self.help = !self.help,
            KeyCode::Esc | KeyCode::Char('q') if self.help => self.help = false,
            KeyCode::Esc | KeyCode::Char('q') => return true,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Char('+') => self.interval_s = (self.interval_s + 1).min(INTERVAL_MAX),
            KeyCode::Char('-') => self.interval_s = (self.interval_s - 1).max(1),
            KeyCode::Down => self.scroll = (self.scroll + 1).min(last),
            KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = (self.scroll + PAGE).min(last),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(PAGE),
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = last,
            _ => {}
        }
        false
    }
}
