//! What loading the programs needs: the object that is checked in, and a kernel that takes it.

use std::path::Path;
use std::process::Command;

use aya::maps::MapError;

use super::tests::skip;
use super::*;

/// Recompiles the BPF programs and compares the object with the committed one, byte by byte. Only Debian 12's clang-14 counts
/// (`make packages` installs it): other compilers generate other code.
#[test]
fn the_object_is_what_the_sources_make() {
    const CLANG: &str = "clang-14";
    let Ok(version) = Command::new(CLANG).arg("--version").output() else {
        return skip(format!("there is no {CLANG}"));
    };
    assert!(version.status.success());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernel/programs");
    let made = tempfile::tempdir().unwrap();
    let object = made.path().join("forward.o");
    let done = Command::new(folder.join("compile")).arg(&object).status().unwrap();
    assert!(done.success());
    assert!(
        std::fs::read(object).unwrap() == OBJECT,
        "run vnet/src/kernel/programs/compile, and commit forward.o"
    );
}

/// Older kernels refuse the maps or a program, as do newer ones without the capabilities: the text names all that may lack.
#[test]
fn a_kernel_that_is_too_old_is_told_in_one_line() {
    let refused =
        |code| MapError::CreateError { name: "tallies".into(), io_error: io::Error::from_raw_os_error(code) };
    for (code, why) in [(libc::EINVAL, "Invalid argument"), (libc::EPERM, "Operation not permitted")] {
        // As the loader reports it.
        let text = KernelError::Load(in_one_line(&aya::EbpfError::MapError(refused(code)))).to_string();
        let want = format!(
            "the kernel takes no programs: map error: failed to create map `tallies`: {why} (os error {code}); it needs Linux \
             5.10, CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN"
        );
        assert_eq!(text, want);
    }
}

#[test]
fn a_lan_needs_a_kernel_with_tcx() {
    for (version, takes) in [((6, 5, 13), false), ((6, 6, 0), true), ((5, 10, 0), false), ((7, 0, 0), true)] {
        let (major, minor, patch) = version;
        let checked = check_lan("eth0", KernelVersion::new(major, minor, patch));
        let want = "device 'eth0' takes no programs: that needs Linux 6.6";
        assert_eq!(checked.map_err(|error| error.to_string()), if takes { Ok(()) } else { Err(want.into()) });
    }
}
